//! Mistakes in a sweep file or a `--set` argument: collected as they are found, shown together, each with its place and what is allowed.

use std::fmt;
use std::ops::Range;

/// Everything that is wrong with a sweep file and what is laid over it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecErrors {
    /// Name of the sweep file.
    pub file: String,
    /// In the order of the file, `--set` arguments last.
    pub errors: Vec<SpecError>,
}

/// One mistake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpecError {
    /// Where.
    pub place: Place,
    /// What is wrong, a sentence without a full stop.
    pub message: String,
    /// What is allowed, the nearest valid name, what to do.
    pub help: Vec<String>,
}

/// Where a mistake stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the sweep file.
    File {
        /// From 1.
        line: usize,
        /// From 1, in characters.
        column: usize,
        /// The line.
        excerpt: String,
        /// Characters underlined, from `column` on.
        width: usize,
    },
    /// In a `--set` argument, quoted as typed.
    Argument(String),
    /// Not at one place: something is missing.
    Whole,
}

impl std::error::Error for SpecErrors {}

impl fmt::Display for SpecErrors {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.errors.len() {
            1 => write!(formatter, "{} has a mistake", self.file)?,
            count => write!(formatter, "{} has {count} mistakes", self.file)?,
        }
        for error in &self.errors {
            write!(formatter, "\n\n")?;
            error.write(&self.file, formatter)?;
        }
        Ok(())
    }
}

impl SpecError {
    fn write(&self, file: &str, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut margin = String::new();
        match &self.place {
            Place::File { line, column, excerpt, width } => {
                writeln!(formatter, "{file}:{line}:{column}: {}", self.message)?;
                let number = line.to_string();
                margin = " ".repeat(number.len());
                writeln!(formatter, "{margin} |")?;
                writeln!(formatter, "{number} | {excerpt}")?;
                write!(formatter, "{margin} | {}{}", " ".repeat(column - 1), "^".repeat((*width).max(1)))?;
            }
            Place::Argument(argument) => write!(formatter, "--set {argument}: {}", self.message)?,
            Place::Whole => write!(formatter, "{file}: {}", self.message)?,
        }
        for help in &self.help {
            let mut column = 0;
            for (number, word) in help.split(' ').enumerate() {
                if number == 0 {
                    write!(formatter, "\n{margin} = {word}")?;
                } else if column + word.len() > HELP_WIDTH {
                    write!(formatter, "\n{margin}   {word}")?;
                    column = 0;
                } else {
                    write!(formatter, " {word}")?;
                }
                column += word.len() + 1;
            }
        }
        Ok(())
    }
}

/// Help is wrapped after this many bytes, so that lists of names stay readable.
const HELP_WIDTH: usize = 110;

/// Where something was written: a byte range of the file, or a `--set` argument by its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    File(Range<usize>),
    Argument(usize),
    Whole,
}

/// Collects mistakes while a sweep file is read and resolved.
pub(crate) struct Mistakes<'a> {
    file: &'a str,
    text: &'a str,
    arguments: &'a [String],
    found: Vec<(Origin, SpecError)>,
}

impl<'a> Mistakes<'a> {
    pub(crate) fn new(file: &'a str, text: &'a str, arguments: &'a [String]) -> Self {
        Self { file, text, arguments, found: Vec::new() }
    }

    /// Adds a mistake; what the reader can do is pushed on the lines returned.
    pub(crate) fn add(&mut self, origin: &Origin, message: impl Into<String>) -> &mut Vec<String> {
        let place = self.place(origin);
        self.found.push((origin.clone(), SpecError { place, message: message.into(), help: Vec::new() }));
        let (_, error) = self.found.last_mut().expect("one was just pushed");
        &mut error.help
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    /// The line a place is on, for sentences that mention a second place.
    pub(crate) fn mention(&self, origin: &Origin) -> String {
        match self.place(origin) {
            Place::File { line, .. } => format!("line {line}"),
            Place::Argument(argument) => format!("--set {argument}"),
            Place::Whole => self.file.to_owned(),
        }
    }

    /// All mistakes in the order of the file, equal ones once.
    pub(crate) fn finish(mut self) -> SpecErrors {
        self.found.sort_by_key(|(origin, _)| match origin {
            Origin::Whole => (0, 0),
            Origin::File(span) => (1, span.start),
            Origin::Argument(number) => (2, *number),
        });
        self.found.dedup();
        SpecErrors { file: self.file.to_owned(), errors: self.found.into_iter().map(|(_, error)| error).collect() }
    }

    fn place(&self, origin: &Origin) -> Place {
        let span = match origin {
            Origin::File(span) => span,
            Origin::Argument(number) => return Place::Argument(self.arguments.get(*number).cloned().unwrap_or_default()),
            Origin::Whole => return Place::Whole,
        };
        let start = floor(self.text, span.start);
        let line_start = self.text[..start].rfind('\n').map_or(0, |newline| newline + 1);
        let line_end = self.text[start..].find('\n').map_or(self.text.len(), |newline| start + newline);
        let end = floor(self.text, span.end).clamp(start, line_end);
        Place::File {
            line: self.text[..start].matches('\n').count() + 1,
            column: self.text[line_start..start].chars().count() + 1,
            excerpt: self.text[line_start..line_end].trim_end().replace('\t', " "),
            width: self.text[start..end].trim_end().chars().count().max(1),
        }
    }
}

/// The nearest character boundary at or before `index`.
fn floor(text: &str, index: usize) -> usize {
    let mut index = index.min(text.len());
    while !text.is_char_boundary(index) {
        index -= 1;
    }
    index
}

/// The valid name that `written` was most likely meant to be.
pub(crate) fn nearest<'n>(written: &str, names: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let lower = written.to_lowercase();
    names
        .into_iter()
        .map(|name| {
            let candidate = name.to_lowercase();
            let distance = strsim::damerau_levenshtein(&lower, &candidate);
            let close = distance <= 1 + candidate.chars().count() / 4;
            (name, distance, close)
        })
        .filter(|(_, _, close)| *close)
        .min_by_key(|(_, distance, _)| *distance)
        .map(|(name, _, _)| name)
}

/// `a`, `b` and `c`, in back quotes.
pub(crate) fn list<'n>(names: impl IntoIterator<Item = &'n str>) -> String {
    names.into_iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}
