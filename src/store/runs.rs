//! Run folders: making one and finding the newest.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::{FORMAT_VERSION, RunFolder, RunManifest, StoreError, io_error, read_json};

/// Bytes of a run folder's name that are random, so that runs begun within one second do not meet.
const SUFFIX_LENGTH: usize = 6;

impl RunFolder {
    /// Its name: UTC time and a random suffix, so that names sort by time.
    pub fn name(&self) -> String {
        self.0.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// What the run set out to do.
    ///
    /// # Errors
    /// `run.json` is missing or damaged, or was written by a newer `sweep`.
    pub fn read_manifest(&self) -> Result<RunManifest, StoreError> {
        #[derive(serde::Deserialize)]
        struct Version {
            format_version: u32,
            sweep_version: String,
        }
        // The version first: a newer manifest may have another form altogether.
        let version: Version = read_json(&self.manifest())?;
        if version.format_version > FORMAT_VERSION {
            return Err(StoreError::NewerFormat { path: self.0.clone(), found: version.format_version, writer: version.sweep_version });
        }
        read_json(&self.manifest())
    }
}

/// Makes an empty run folder `<results>/<sweep>/<run>`. It becomes the sweep's newest run by [`RunFolder::publish`].
///
/// # Errors
/// The operating system refused.
pub fn create_run(results: &Path, sweep: &str) -> Result<RunFolder, StoreError> {
    let parent = results.join(sweep);
    fs::create_dir_all(&parent).map_err(io_error("create", &parent))?;
    let time = humantime::format_rfc3339_micros(SystemTime::now()).to_string();
    // 2026-11-30T15:49:32.123456Z becomes 20261130T154932.123456Z: no colons, which some file systems refuse.
    let prefix = format!("{}-", time.replace(['-', ':'], ""));
    let folder = tempfile::Builder::new().prefix(&prefix).rand_bytes(SUFFIX_LENGTH).permissions(permissions()).tempdir_in(&parent);
    let path = folder.map_err(io_error("create", &parent))?.keep();
    let folder = RunFolder(path);
    fs::create_dir(folder.trials()).map_err(io_error("create", &folder.trials()))?;
    Ok(folder)
}

/// Checks that runs can be made in `folder`, which is made where it is missing.
///
/// # Errors
/// The operating system refused.
pub fn check_writable(folder: &Path) -> Result<(), StoreError> {
    fs::create_dir_all(folder).map_err(io_error("create", folder))?;
    tempfile::tempfile_in(folder).map(drop).map_err(io_error("write", folder))
}

/// A run folder is readable as any other folder is; the umask still applies.
fn permissions() -> fs::Permissions {
    std::os::unix::fs::PermissionsExt::from_mode(0o777)
}

impl RunFolder {
    /// Makes it the newest run of its sweep: `<results>/<sweep>/latest`, replaced by rename.
    ///
    /// # Errors
    /// The operating system refused.
    pub fn publish(&self) -> Result<(), StoreError> {
        let parent = self.0.parent().unwrap_or(Path::new("."));
        let latest = parent.join("latest");
        let nanoseconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let temporary = parent.join(format!(".latest-{}-{nanoseconds}", std::process::id()));
        symlink(self.name(), &temporary).map_err(io_error("create", &temporary))?;
        fs::rename(&temporary, &latest).map_err(io_error("rename", &latest))
    }
}

/// Whether `path` is a run folder: it has a manifest.
fn is_run(path: &Path) -> bool {
    path.join("run.json").is_file()
}

/// Run folders directly in `folder`, oldest first.
fn runs_in(folder: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(Vec::new()),
        Err(error) => return Err(io_error("read", folder)(error)),
    };
    let mut runs = Vec::new();
    for entry in entries {
        let path = entry.map_err(io_error("read", folder))?.path();
        // `latest` is one of the others again.
        if !path.is_symlink() && is_run(&path) {
            runs.push(path);
        }
    }
    runs.sort();
    Ok(runs)
}

/// The newest run of a sweep.
///
/// # Errors
/// The results folder exists and cannot be read.
pub fn newest_run(results: &Path, sweep: &str) -> Result<Option<RunFolder>, StoreError> {
    Ok(runs_in(&results.join(sweep))?.pop().map(RunFolder))
}

/// The run that a command's `RUN` argument means: a run folder, a sweep's folder or name (its newest run), or, without one, the newest run of all sweeps.
/// `None` where there is no such run.
///
/// # Errors
/// A folder exists and cannot be read.
pub fn choose_run(results: &Path, run: Option<&Path>) -> Result<Option<RunFolder>, StoreError> {
    let Some(run) = run else {
        let mut newest: Option<PathBuf> = None;
        let entries = match fs::read_dir(results) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(io_error("read", results)(error)),
        };
        for entry in entries {
            let run = runs_in(&entry.map_err(io_error("read", results))?.path())?.pop();
            if run.as_ref().and_then(|run| run.file_name()) > newest.as_ref().and_then(|run| run.file_name()) {
                newest = run;
            }
        }
        return Ok(newest.map(RunFolder));
    };
    for candidate in [run.to_owned(), results.join(run)] {
        if is_run(&candidate) {
            // Its real name, where `latest` was given.
            return Ok(Some(RunFolder(candidate.canonicalize().map_err(io_error("read", &candidate))?)));
        }
        if let Some(run) = runs_in(&candidate)?.pop() {
            return Ok(Some(RunFolder(run)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn mark(folder: &RunFolder) {
        fs::write(folder.manifest(), "{}").unwrap();
    }

    /// Case 9: runs begun within one second have folders of their own.
    #[test]
    fn runs_begun_at_once_do_not_meet() {
        let results = tempfile::tempdir().unwrap();
        let create = || create_run(results.path(), "sweep").unwrap().0;
        let runs: Vec<PathBuf> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(create)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(runs.iter().collect::<BTreeSet<_>>().len(), 8);
    }

    #[test]
    fn the_newest_run_is_found_by_every_way_of_naming_it() {
        let results = tempfile::tempdir().unwrap();
        let at = |run: Option<&str>| choose_run(results.path(), run.map(Path::new)).unwrap().map(|run| run.name());
        assert_eq!(at(None), None);
        assert_eq!(newest_run(results.path(), "one").unwrap(), None);
        let first = create_run(results.path(), "one").unwrap();
        mark(&first);
        first.publish().unwrap();
        let second = create_run(results.path(), "one").unwrap();
        mark(&second);
        second.publish().unwrap();
        // A run that was cut off before its manifest is no run.
        create_run(results.path(), "one").unwrap();
        let other = create_run(results.path(), "another").unwrap();
        mark(&other);
        assert_eq!(newest_run(results.path(), "one").unwrap(), Some(second.clone()));
        assert_eq!(at(None), Some(other.name()));
        assert_eq!(at(Some("one")), Some(second.name()));
        assert_eq!(at(Some("one/latest")), Some(second.name()));
        assert_eq!(at(Some(&format!("one/{}", first.name()))), Some(first.name()));
        assert_eq!(at(Some(&first.0.to_string_lossy())), Some(first.name()));
        assert_eq!(at(Some("none")), None);
    }

    /// Case 40: a newer results format is refused by name.
    #[test]
    fn a_newer_format_says_which_version_it_needs() {
        let results = tempfile::tempdir().unwrap();
        let run = create_run(results.path(), "sweep").unwrap();
        fs::write(run.manifest(), r#"{"format_version": 99, "sweep_version": "7.1.0", "anything": []}"#).unwrap();
        let error = run.read_manifest().unwrap_err().to_string();
        assert!(error.ends_with("has results format 99, this sweep reads up to 1; use sweep 7.1.0 or newer"), "{error}");
    }
}
