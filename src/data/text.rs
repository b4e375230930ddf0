//! Text of one split: from text files, JSON lines or parquet tables, as rows or as a whole.

use std::fs::File;
use std::path::{Path, PathBuf};

use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use parquet::record::Field;
use parquet::schema::types::Type;

use super::error::{DataError, read_file, utf8};

/// Text of one split.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Text {
    text: String,
    /// Where each row of a table ends; empty where the text is a file's whole contents.
    row_ends: Vec<usize>,
}

impl Text {
    /// Reads files one after the other. Tables (`.parquet`, `.jsonl`) have rows in a column `text`; anything else is text as it stands.
    pub(crate) fn read(what: &str, files: &[PathBuf]) -> Result<Self, DataError> {
        let mut text = Self::default();
        for file in files {
            match Format::of(file) {
                Format::Parquet => text.push_parquet(what, file)?,
                Format::JsonLines => text.push_json_lines(&utf8(read_file(what, file)?, file)?, file)?,
                Format::Plain => text.text.push_str(&utf8(read_file(what, file)?, file)?),
            }
        }
        if text.text.is_empty() {
            let place = files.iter().map(|file| file.display().to_string()).collect::<Vec<_>>().join(", ");
            return Err(DataError::Empty { what: what.to_owned(), place });
        }
        Ok(text)
    }

    /// Rows of a table as they are; `None` for plain text.
    pub(crate) fn rows(&self) -> Option<Vec<&str>> {
        if self.row_ends.is_empty() {
            return None;
        }
        let starts = std::iter::once(0).chain(self.row_ends.iter().copied());
        Some(starts.zip(&self.row_ends).map(|(start, end)| &self.text[start..*end]).collect())
    }

    /// The whole of it.
    pub(crate) fn whole(&self) -> &str {
        &self.text
    }

    /// Lines with their ends; of a table, of each row.
    pub(crate) fn lines(&self) -> Vec<&str> {
        match self.rows() {
            Some(rows) => rows.into_iter().flat_map(|row| row.split_inclusive('\n')).collect(),
            None => self.text.split_inclusive('\n').collect(),
        }
    }

    /// Documents for `packing = "per_document"`: the rows of a table that are not empty; of plain text its paragraphs, which blank lines separate.
    pub(crate) fn documents(&self) -> Vec<&str> {
        match self.rows() {
            Some(rows) => rows.into_iter().filter(|row| !row.trim().is_empty()).collect(),
            None => paragraphs(&self.text),
        }
    }

    fn push_row(&mut self, row: &str) {
        self.text.push_str(row);
        self.row_ends.push(self.text.len());
    }

    fn push_json_lines(&mut self, contents: &str, path: &Path) -> Result<(), DataError> {
        for (index, line) in contents.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
            let malformed = |reason: String| DataError::Malformed {
                path: path.to_owned(),
                expected: "a JSON-lines file",
                reason: format!("line {}: {reason}", index + 1),
            };
            let record: serde_json::Map<String, serde_json::Value> = serde_json::from_str(line).map_err(|error| malformed(error.to_string()))?;
            match record.get("text") {
                Some(serde_json::Value::String(row)) => self.push_row(row),
                Some(serde_json::Value::Null) => self.push_row(""),
                Some(_) => return Err(malformed("`text` is not a string".to_owned())),
                None => return Err(DataError::NoTextColumn { path: path.to_owned(), columns: record.keys().cloned().collect() }),
            }
        }
        Ok(())
    }

    fn push_parquet(&mut self, what: &str, path: &Path) -> Result<(), DataError> {
        if path.is_dir() {
            return Err(DataError::Folder { what: what.to_owned(), path: path.to_owned() });
        }
        let file = File::open(path).map_err(|error| DataError::Unreadable { what: what.to_owned(), path: path.to_owned(), error })?;
        // The reader panics on some damaged files; to the user that is one more way of being damaged.
        let read = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| self.push_parquet_rows(file, path)));
        read.unwrap_or_else(|_| Err(malformed_parquet(path, "its contents are damaged")))
    }

    fn push_parquet_rows(&mut self, file: File, path: &Path) -> Result<(), DataError> {
        let malformed = |error: ParquetError| malformed_parquet(path, error);
        let reader = SerializedFileReader::new(file).map_err(malformed)?;
        let schema = reader.metadata().file_metadata().schema();
        let Some(column) = schema.get_fields().iter().find(|field| field.name() == "text") else {
            let columns = schema.get_fields().iter().map(|field| format!("{} ({})", field.name(), column_type(field))).collect();
            return Err(DataError::NoTextColumn { path: path.to_owned(), columns });
        };
        let projection = Type::group_type_builder(schema.name()).with_fields(vec![column.clone()]).build().map_err(malformed)?;
        for row in reader.get_row_iter(Some(projection)).map_err(malformed)? {
            match row.map_err(malformed)?.get_column_iter().next() {
                Some((_, Field::Str(row))) => self.push_row(row),
                Some((_, Field::Null)) => self.push_row(""),
                // Some writers do not mark text as text.
                Some((_, Field::Bytes(bytes))) => match std::str::from_utf8(bytes.data()) {
                    Ok(row) => self.push_row(row),
                    Err(_) => return Err(malformed_parquet(path, "column `text` holds bytes that are not UTF-8 text")),
                },
                _ => return Err(malformed_parquet(path, format!("column `text` is {} and not text", column_type(column)))),
            }
        }
        Ok(())
    }
}

fn malformed_parquet(path: &Path, reason: impl ToString) -> DataError {
    DataError::Malformed { path: path.to_owned(), expected: "a parquet file", reason: reason.to_string() }
}

/// What a file's name says it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// A parquet table.
    Parquet,
    /// A JSON object a line.
    JsonLines,
    /// Text as it stands.
    Plain,
}

impl Format {
    /// By the name's end.
    pub(crate) fn of(path: &Path) -> Self {
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("parquet") => Self::Parquet,
            Some("jsonl" | "ndjson") => Self::JsonLines,
            _ => Self::Plain,
        }
    }
}

fn column_type(column: &Type) -> String {
    if column.is_primitive() { column.get_physical_type().to_string() } else { "a group".to_owned() }
}

/// Runs of lines that are not blank, line ends and all.
fn paragraphs(text: &str) -> Vec<&str> {
    let mut paragraphs = Vec::new();
    let mut start = None;
    let mut offset = 0;
    for line in text.split_inclusive('\n') {
        if line.trim().is_empty() {
            paragraphs.extend(start.take().map(|start| &text[start..offset]));
        } else {
            start.get_or_insert(offset);
        }
        offset += line.len();
    }
    paragraphs.extend(start.map(|start| &text[start..]));
    paragraphs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(name: &str, contents: &[u8]) -> Result<Text, DataError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, contents).unwrap();
        Text::read("the training text", &[path])
    }

    fn message(name: &str, contents: &[u8]) -> String {
        let error = read(name, contents).unwrap_err().to_string();
        let start = error.find('/').unwrap();
        let end = error.find(name).unwrap();
        format!("{}{}", &error[..start], &error[end..])
    }

    #[test]
    fn plain_text_is_taken_whole() {
        let text = read("a.txt", b" \n = Heading = \n\nOne.\nTwo.\n \n Three.").unwrap();
        assert_eq!(text.whole(), " \n = Heading = \n\nOne.\nTwo.\n \n Three.");
        assert_eq!(text.rows(), None);
        assert_eq!(text.documents(), [" = Heading = \n", "One.\nTwo.\n", " Three."]);
    }

    #[test]
    fn json_lines_have_rows() {
        let text = read("a.jsonl", b"{\"text\": \"One\\n\", \"id\": 1}\n\n{\"text\": \"\"}\n{\"text\": null}\n{\"text\": \"Two\"}\n").unwrap();
        assert_eq!(text.rows().unwrap(), ["One\n", "", "", "Two"]);
        assert_eq!(text.documents(), ["One\n", "Two"]);
        assert_eq!(text.whole(), "One\nTwo");
    }

    #[test]
    fn bad_text_is_named() {
        assert_eq!(message("a.txt", b""), "the training text a.txt is empty");
        assert_eq!(message("a.txt", b"caf\xe9 noir"), "a.txt is not UTF-8 text: invalid byte 0xe9 at offset 3");
        assert_eq!(message("a.jsonl", b"{\"text\": \"a\"}\n{\"text\": 1}\n"), "a.jsonl is not a JSON-lines file: line 2: `text` is not a string");
        assert_eq!(message("a.jsonl", b"{\"body\": \"a\", \"id\": 1}\n"), "a.jsonl has no column `text`; its columns are body, id");
        assert!(message("a.jsonl", b"{\"text\": \"a\"\n").starts_with("a.jsonl is not a JSON-lines file: line 1: EOF"));
        assert!(message("a.parquet", b"PAR1 but no more").starts_with("a.parquet is not a parquet file: "));
        let folder = tempfile::tempdir().unwrap();
        let error = Text::read("the training text", &[folder.path().to_owned()]).unwrap_err();
        assert_eq!(error.to_string(), format!("the training text {} is a folder, not a file", folder.path().display()));
        let error = Text::read("the training text", &[folder.path().join("no.txt")]).unwrap_err();
        assert!(error.to_string().starts_with("cannot read the training text ") && error.to_string().contains("No such file"), "{error}");
    }
}
