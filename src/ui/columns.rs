//! Text in columns. Pure.

/// Which side of its column a cell leans to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Align {
    Left,
    Right,
}

/// Writes rows of cells below each other, columns two spaces apart, nothing after the last cell of a row.
pub(super) fn columns<const N: usize>(align: [Align; N], rows: &[[String; N]]) -> String {
    let mut widths = [0; N];
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(console::measure_text_width(cell));
        }
    }
    let mut text = String::new();
    for row in rows {
        let cells = row.iter().zip(align).zip(widths).map(|((cell, align), width)| {
            let side = if align == Align::Left { console::Alignment::Left } else { console::Alignment::Right };
            console::pad_str(cell, width, side, None).into_owned()
        });
        text.push_str(cells.collect::<Vec<_>>().join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{Align, columns};

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = [["n", "name"], ["10", "na\u{ef}ve"], ["", "x"], ["2", ""]].map(|row| row.map(str::to_owned));
        assert_eq!(columns([Align::Right, Align::Left], &rows), " n  name\n10  na\u{ef}ve\n    x\n 2\n");
    }
}
