//! Reads a child's `messages.jsonl` while it grows.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::protocol::Message;

/// Longest line that is kept waiting for its end; a longer one is skipped.
const LONGEST_LINE: usize = 16 << 20;

/// Follows one file from its beginning.
#[derive(Debug)]
pub(super) struct MessageTail {
    path: PathBuf,
    file: Option<File>,
    /// The beginning of a line whose end is not written yet.
    half: Vec<u8>,
    line: usize,
    /// Line number (from 1) and reason of the first line that could not be read.
    pub(super) unreadable: Option<(usize, String)>,
}

impl MessageTail {
    /// Follows `path`, which need not exist yet.
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), file: None, half: Vec::new(), line: 0, unreadable: None }
    }

    /// Messages that are complete since the last call. Kinds that only newer versions know are skipped.
    pub(super) fn read_new(&mut self) -> Vec<Message> {
        if self.file.is_none() {
            match File::open(&self.path) {
                Ok(file) => self.file = Some(file),
                Err(error) => {
                    if error.kind() != ErrorKind::NotFound {
                        self.unreadable.get_or_insert((1, error.to_string()));
                    }
                    return Vec::new();
                }
            }
        }
        let Some(file) = &mut self.file else { return Vec::new() };
        if let Err(error) = file.read_to_end(&mut self.half) {
            self.unreadable.get_or_insert((self.line + 1, error.to_string()));
        }
        let mut messages = Vec::new();
        let whole = self.half.iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1);
        for line in self.half[..whole].split_inclusive(|byte| *byte == b'\n') {
            self.line += 1;
            if line.trim_ascii().is_empty() {
                continue;
            }
            match serde_json::from_slice(line) {
                Ok(message) => messages.push(message),
                Err(error) if error.to_string().starts_with("unknown variant") => {}
                Err(error) => {
                    self.unreadable.get_or_insert((self.line, error.to_string()));
                }
            }
        }
        self.half.drain(..whole);
        if self.half.len() > LONGEST_LINE {
            self.half.clear();
            self.unreadable.get_or_insert((self.line + 1, "the line is too long".to_owned()));
        }
        messages
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::protocol::MessageKind;

    #[test]
    fn half_lines_wait_unknown_kinds_are_skipped_and_damage_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("messages.jsonl");
        let mut tail = MessageTail::new(&path);
        assert_eq!(tail.read_new(), []);
        let mut file = File::create(&path).unwrap();
        let line = r#"{"at":"2026-01-01T00:00:00.000Z","kind":"phase","phase":"load"}"#;
        let (first, second) = line.split_at(20);
        file.write_all(first.as_bytes()).unwrap();
        assert_eq!(tail.read_new(), []);
        file.write_all(format!("{second}\n{{\"at\":\"2026-01-01T00:00:00.000Z\",\"kind\":\"from_the_future\"}}\n").as_bytes()).unwrap();
        assert!(matches!(&tail.read_new()[..], [Message { kind: MessageKind::Phase { phase }, .. }] if phase == "load"));
        assert_eq!(tail.unreadable, None);
        file.write_all(format!("\n\u{0}garbage\n{line}\n").as_bytes()).unwrap();
        assert_eq!(tail.read_new().len(), 1);
        assert_eq!(tail.unreadable.as_ref().map(|(line, _)| *line), Some(4));
    }
}
