//! A table apart from its format: cells with footnote numbers, and how it is written as Markdown, LaTeX, HTML and CSV.

use std::fmt::Write as _;

/// A table for readers.
#[derive(Clone, Debug, Default)]
pub(super) struct Table {
    pub(super) headings: Vec<String>,
    /// Columns that hold numbers are set to the right.
    pub(super) numeric: Vec<bool>,
    pub(super) rows: Vec<Vec<Cell>>,
    /// Texts of the footnotes; number 1 is the first.
    pub(super) footnotes: Vec<String>,
    /// What holds for the whole table, a sentence each.
    pub(super) remarks: Vec<String>,
}

/// What stands in a cell, and the numbers of its footnotes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) text: String,
    pub(super) notes: Vec<usize>,
}

impl Cell {
    /// A cell without footnotes.
    pub(super) fn plain(text: impl Into<String>) -> Self {
        Self { text: text.into(), notes: Vec::new() }
    }
}

impl Table {
    /// The number of a footnote; a text that is there already keeps its number.
    pub(super) fn footnote(&mut self, text: &str) -> usize {
        if let Some(index) = self.footnotes.iter().position(|known| known == text) {
            return index + 1;
        }
        self.footnotes.push(text.to_owned());
        self.footnotes.len()
    }

    /// As Markdown: columns padded, so that it reads well as plain text too; footnotes as `[1]`.
    pub(super) fn markdown(&self) -> String {
        let rows: Vec<Vec<String>> = self.rows.iter().map(|row| row.iter().map(markdown_cell).collect()).collect();
        let headings: Vec<String> = self.headings.iter().map(|heading| escape_markdown(heading)).collect();
        let widths: Vec<usize> = (0..headings.len())
            .map(|column| rows.iter().chain([&headings]).filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0).max(3))
            .collect();
        let mut text = String::new();
        let mut line = |cells: &[String]| {
            let padded = cells.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
            let _ = writeln!(text, "| {} |", padded.collect::<Vec<_>>().join(" | "));
        };
        line(&headings);
        line(&widths.iter().map(|_| "---".to_owned()).collect::<Vec<_>>());
        rows.iter().for_each(|row| line(row));
        self.below(&mut text, escape_markdown);
        text
    }

    /// Footnotes and remarks as Markdown lists.
    fn below(&self, text: &mut String, escape: impl Fn(&str) -> String) {
        if !self.footnotes.is_empty() {
            text.push('\n');
        }
        for (index, footnote) in self.footnotes.iter().enumerate() {
            let _ = writeln!(text, "- [{}] {}", index + 1, escape(footnote));
        }
        if !self.remarks.is_empty() {
            text.push('\n');
        }
        for remark in &self.remarks {
            let _ = writeln!(text, "- {}", escape(remark));
        }
    }

    /// As a plain LaTeX `tabular`, without packages.
    pub(super) fn latex(&self) -> String {
        let columns: String = self.numeric.iter().map(|numeric| if *numeric { 'r' } else { 'l' }).collect();
        let mut text = format!("\\begin{{tabular}}{{{columns}}}\n\\hline\n");
        let line = |cells: Vec<String>| format!("{} \\\\\n", cells.join(" & "));
        text += &line(self.headings.iter().map(|heading| escape_latex(heading)).collect());
        text += "\\hline\n";
        for row in &self.rows {
            text += &line(
                row.iter()
                    .map(|cell| match cell.notes.as_slice() {
                        [] => escape_latex(&cell.text),
                        notes => format!("{}\\textsuperscript{{{}}}", escape_latex(&cell.text), numbers(notes)),
                    })
                    .collect(),
            );
        }
        text += "\\hline\n\\end{tabular}\n";
        for (index, footnote) in self.footnotes.iter().enumerate() {
            let _ = writeln!(text, "\n\\textsuperscript{{{}}} {}", index + 1, escape_latex(footnote));
        }
        for remark in &self.remarks {
            let _ = writeln!(text, "\n{}", escape_latex(remark));
        }
        text
    }

    /// As an HTML table with its notes below.
    pub(super) fn html(&self) -> String {
        let class = |column: usize| if self.numeric.get(column).copied().unwrap_or(false) { " class=\"number\"" } else { "" };
        let mut text = String::from("<div class=\"wide\"><table>\n<thead><tr>");
        for (column, heading) in self.headings.iter().enumerate() {
            let _ = write!(text, "<th{}>{}</th>", class(column), escape_html(heading));
        }
        text += "</tr></thead>\n<tbody>\n";
        for row in &self.rows {
            text += "<tr>";
            for (column, cell) in row.iter().enumerate() {
                let _ = write!(text, "<td{}>{}", class(column), escape_html(&cell.text));
                if !cell.notes.is_empty() {
                    let _ = write!(text, "<sup>{}</sup>", numbers(&cell.notes));
                }
                text += "</td>";
            }
            text += "</tr>\n";
        }
        text += "</tbody>\n</table></div>\n";
        if !self.footnotes.is_empty() {
            text += "<ol class=\"notes\">\n";
            for footnote in &self.footnotes {
                let _ = writeln!(text, "<li>{}</li>", escape_html(footnote));
            }
            text += "</ol>\n";
        }
        if !self.remarks.is_empty() {
            text += "<ul class=\"notes\">\n";
            for remark in &self.remarks {
                let _ = writeln!(text, "<li>{}</li>", escape_html(remark));
            }
            text += "</ul>\n";
        }
        text
    }
}

fn numbers(notes: &[usize]) -> String {
    notes.iter().map(usize::to_string).collect::<Vec<_>>().join(",")
}

fn markdown_cell(cell: &Cell) -> String {
    let text = escape_markdown(&cell.text);
    match cell.notes.as_slice() {
        [] => text,
        notes if text.is_empty() => format!("[{}]", numbers(notes)),
        notes => format!("{text} [{}]", numbers(notes)),
    }
}

/// Text that Markdown shows as it stands, on one line: labels and reasons may hold anything.
pub(super) fn escape_markdown(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\n' | '\r' => escaped.push(' '),
            '|' | '*' | '`' | '<' | '\\' => {
                escaped.push('\\');
                escaped.push(character);
            }
            _ => escaped.push(character),
        }
    }
    escaped
}

fn escape_latex(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' | '%' | '$' | '#' | '_' | '{' | '}' => {
                escaped.push('\\');
                escaped.push(character);
            }
            '~' => escaped += "\\textasciitilde{}",
            '^' => escaped += "\\textasciicircum{}",
            '\\' => escaped += "\\textbackslash{}",
            '<' => escaped += "\\textless{}",
            '>' => escaped += "\\textgreater{}",
            '|' => escaped += "\\textbar{}",
            '±' => escaped += "$\\pm$",
            '\n' | '\r' => escaped.push(' '),
            _ => escaped.push(character),
        }
    }
    escaped
}

/// Text that HTML shows as it stands.
pub(super) fn escape_html(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;").replace('\'', "&#39;")
}

/// Lines of comma-separated values, quoted where they must be (RFC 4180, but with `\n` as the line's end).
pub(super) fn csv(headings: &[&str], rows: &[Vec<String>]) -> String {
    let mut text = headings.join(",");
    text.push('\n');
    for row in rows {
        text += &row.iter().map(|cell| csv_cell(cell)).collect::<Vec<_>>().join(",");
        text.push('\n');
    }
    text
}

fn csv_cell(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::{Cell, Table, csv};

    fn table() -> Table {
        let mut table = Table {
            headings: vec!["Method".into(), "Block size max".into()],
            numeric: vec![false, true],
            rows: vec![vec![Cell::plain("a|b_c & 2% *x*"), Cell::plain("64")]],
            ..Table::default()
        };
        let first = table.footnote("x < y");
        assert_eq!((first, table.footnote("other"), table.footnote("x < y")), (1, 2, 1));
        table.rows.push(vec![Cell { text: String::new(), notes: vec![1, 2] }, Cell { text: "7".into(), notes: vec![2] }]);
        table.remarks.push("All of it.".into());
        table
    }

    #[test]
    fn markdown_is_padded_and_escaped() {
        assert_eq!(
            table().markdown(),
            "\
| Method               | Block size max |
| ---                  | ---            |
| a\\|b_c & 2% \\*x\\*    | 64             |
| [1,2]                | 7 [2]          |

- [1] x \\< y
- [2] other

- All of it.
"
            .replace("    | 64", " | 64")
            .replace("| Method               |", "| Method            |")
            .replace("| ---                  |", "| ---               |")
            .replace("| [1,2]                |", "| [1,2]             |")
        );
    }

    #[test]
    fn latex_is_escaped() {
        assert_eq!(
            table().latex(),
            "\\begin{tabular}{lr}\n\\hline\nMethod & Block size max \\\\\n\\hline\na\\textbar{}b\\_c \\& 2\\% *x* & 64 \\\\\n\\textsuperscript{1,2} & 7\\textsuperscript{2} \\\\\n\
             \\hline\n\\end{tabular}\n\n\\textsuperscript{1} x \\textless{} y\n\n\\textsuperscript{2} other\n\nAll of it.\n"
        );
    }

    #[test]
    fn html_is_escaped() {
        let html = table().html();
        assert!(html.contains("<td>a|b_c &amp; 2% *x*</td><td class=\"number\">64</td>"), "{html}");
        assert!(html.contains("<td><sup>1,2</sup></td>") && html.contains("<li>x &lt; y</li>"), "{html}");
    }

    #[test]
    fn csv_is_quoted_where_it_must_be() {
        let rows = [vec!["a,b".to_owned(), "say \"x\"\nthen".to_owned()], vec![String::new(), "plain; text".to_owned()]];
        assert_eq!(csv(&["method", "notes"], &rows), "method,notes\n\"a,b\",\"say \"\"x\"\"\nthen\"\n,plain; text\n");
    }
}
