//! The end of a log: what a failed trial is shown with, and where other runners say that memory ran out.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// How much of the end of a log is looked at, in bytes.
const BYTES: u64 = 64 << 10;
/// How many of its last lines are shown, and how much of each, in characters.
const LINES: usize = 20;
const CHARACTERS: usize = 1000;

/// The end of a log as text that can be shown anywhere: decoded lossily, without terminal sequences and without control characters but the ends of lines. Empty
/// where it cannot be read; the log itself keeps every byte.
pub(super) fn read(path: &Path) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(BYTES)))?;
        let mut bytes = Vec::new();
        file.take(BYTES).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let harmless = |character: char| if character.is_control() && !matches!(character, '\n' | '\r') { ' ' } else { character };
    console::strip_ansi_codes(&text).chars().map(harmless).collect()
}

/// Its last lines that are not blank at the end. Of a line that was written over itself with carriage returns the last state is kept, as on a terminal, and of
/// a long one the beginning and the end.
pub(super) fn last_lines(log: &str) -> String {
    let lines: Vec<&str> = log.lines().map(|line| line.trim_end_matches('\r').rsplit('\r').next().unwrap_or_default()).collect();
    let end = lines.iter().rposition(|line| !line.trim().is_empty()).map_or(0, |last| last + 1);
    let shown: Vec<String> = lines[end.saturating_sub(LINES)..end].iter().map(|line| shortened(line)).collect();
    shown.join("\n")
}

fn shortened(line: &str) -> String {
    let characters = line.chars().count();
    if characters <= CHARACTERS {
        return line.to_owned();
    }
    let half = CHARACTERS / 2;
    let beginning: String = line.chars().take(half).collect();
    let end: String = line.chars().skip(characters - half).collect();
    format!("{beginning} [... {} characters ...] {end}", characters - 2 * half)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn the_tail_of_a_log_reads_like_a_terminal() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("stderr.log");
        let tail = || last_lines(&read(&path));
        fs::write(&path, b"first\n 10%\r100%\nbroken \xff\xfe utf-8\nlast without newline\n\n \n").unwrap();
        assert_eq!(tail(), "first\n100%\nbroken \u{fffd}\u{fffd} utf-8\nlast without newline");
        fs::write(&path, "x\n".repeat(1 << 20)).unwrap();
        assert_eq!(tail(), ["x"; LINES].join("\n"));
        fs::write(&path, "").unwrap();
        assert_eq!(tail(), "");
        fs::write(&path, b"\x1b[31mred\x1b[0m\0\x07\tx\n").unwrap();
        assert_eq!(tail(), "red   x");
        fs::remove_file(&path).unwrap();
        assert_eq!(tail(), "");
    }

    #[test]
    fn a_long_line_keeps_both_ends() {
        let tail = last_lines(&format!("begin{}end\nlast", "\u{e9}".repeat(5000)));
        assert!(tail.starts_with("begin\u{e9}") && tail.ends_with("\u{e9}end\nlast") && tail.contains(" [... 4008 characters ...] "), "{tail}");
        assert!(tail.chars().count() < 1100);
    }
}
