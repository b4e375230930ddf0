//! What a running trial says: `messages.jsonl`, a line each. Written by rank 0 and by the thread that started the ranks.

use std::fs::File;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use super::error::TrainError;
use super::memory;
use crate::protocol::{Message, MessageKind, PROTOCOL, Timestamp};
use crate::store::JsonLines;

/// The open messages file of an attempt.
#[derive(Debug)]
pub struct Reporter {
    lines: Mutex<JsonLines>,
    /// Sentences told so far; they stand in the result too.
    warnings: Mutex<Vec<String>>,
}

impl Reporter {
    /// Opens the file, and hands it to the allocator for the message it writes when a rank is over its budget.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn open(path: &Path) -> Result<Self, TrainError> {
        let lines = JsonLines::append_to(path).map_err(|error| TrainError::Request(error.to_string()))?;
        let file =
            File::options().append(true).open(path).map_err(|error| TrainError::Request(format!("cannot write {}: {error}", path.display())))?;
        memory::arm(file.into());
        Ok(Self { lines: Mutex::new(lines), warnings: Mutex::default() })
    }

    /// Appends a message.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn say(&self, kind: MessageKind) -> Result<(), TrainError> {
        memory::host(|| {
            let message = Message { at: Timestamp::now(), kind };
            self.lines.lock().unwrap_or_else(PoisonError::into_inner).push(&message).map_err(|error| TrainError::Failed(error.to_string()))
        })
    }

    /// The first message.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn started(&self, ranks: usize) -> Result<(), TrainError> {
        self.say(MessageKind::Started { protocol: PROTOCOL, pid: std::process::id(), ranks })
    }

    /// A new phase begins.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn phase(&self, phase: &str) -> Result<(), TrainError> {
        self.say(MessageKind::Phase { phase: phase.to_owned() })
    }

    /// Something the user should know; a sentence. Each is told once.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn warn(&self, message: impl Into<String>) -> Result<(), TrainError> {
        let message = message.into();
        let mut warnings = self.warnings.lock().unwrap_or_else(PoisonError::into_inner);
        if warnings.contains(&message) {
            return Ok(());
        }
        warnings.push(message.clone());
        drop(warnings);
        self.say(MessageKind::Warning { message })
    }

    /// All warnings so far.
    pub fn warnings(&self) -> Vec<String> {
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
