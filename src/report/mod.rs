//! Reports: rows, statistics, tables, plots and page, from the results folder alone. Pure.
