//! The Hugging Face hub, and its cache on disk. Fetching goes through `hf-hub`; what is in the cache is found without asking anyone, so that files put
//! there by hand are as good as fetched ones.

use std::fmt;
use std::path::{Component, Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use hf_hub::api::RepoInfo;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};

use super::error::DataError;

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// A hub that does not answer a small question in this time is not reachable. Firewalls that drop packets would keep us for many minutes.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

/// Where the hub is, what it knows us by, and where its files are kept.
#[derive(Clone)]
pub struct Hub {
    home: PathBuf,
    endpoint: String,
    token: Option<String>,
    offline: bool,
}

/// Says whether there is a token, never which.
impl fmt::Debug for Hub {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { home, endpoint, token, offline } = self;
        let token = if token.is_some() { "set" } else { "none" };
        formatter.debug_struct("Hub").field("home", home).field("endpoint", endpoint).field("token", &token).field("offline", offline).finish()
    }
}

/// A model's or data set's repository at a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Repository {
    /// Which kind.
    pub(crate) kind: Kind,
    /// `owner/name`, or `name`.
    pub(crate) id: String,
    /// Branch, tag or commit.
    pub(crate) revision: String,
}

/// Kinds of repository.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Weights, configuration, tokenizer.
    Model,
    /// A data set.
    Dataset,
}

impl Repository {
    /// A model; revision `main` unless another is named.
    pub(crate) fn model(id: &str, revision: Option<&str>) -> Self {
        Self { kind: Kind::Model, id: id.to_owned(), revision: revision.unwrap_or("main").to_owned() }
    }

    /// A data set at revision `main`.
    pub(crate) fn dataset(id: &str) -> Self {
        Self { kind: Kind::Dataset, id: id.to_owned(), revision: "main".to_owned() }
    }

    fn repo(&self) -> Repo {
        let kind = match self.kind {
            Kind::Model => RepoType::Model,
            Kind::Dataset => RepoType::Dataset,
        };
        Repo::with_revision(self.id.clone(), kind, self.revision.clone())
    }
}

impl fmt::Display for Repository {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Model => "model",
            Kind::Dataset => "data set",
        };
        write!(formatter, "{kind} {}", self.id)?;
        if self.revision == "main" { Ok(()) } else { write!(formatter, " at revision {}", self.revision) }
    }
}

/// What a repository holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Listing {
    /// Paths inside the repository, sorted.
    pub(crate) files: Vec<String>,
    /// Where files of this commit lie in the cache, or will.
    snapshot: PathBuf,
    /// Why the hub was not asked and the cache taken as it is; files may be lacking then.
    pub(crate) unreachable: Option<String>,
}

impl Hub {
    /// A hub. `home` is what `HF_HOME` names: files are kept in its `hub` folder.
    pub fn new(home: impl Into<PathBuf>, endpoint: impl Into<String>, token: Option<String>, offline: bool) -> Self {
        Self { home: home.into(), endpoint: endpoint.into().trim_end_matches('/').to_owned(), token, offline }
    }

    /// As `HF_HOME`, `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` say; without a token, the one that `hf auth login` left in `HF_HOME`.
    pub fn from_environment() -> Self {
        Self::from_variables(|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Self {
        let home = variable("HF_HOME").map_or_else(
            || {
                let cache = variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(|| variable("HOME").map(|home| Path::new(&home).join(".cache")));
                cache.unwrap_or_else(std::env::temp_dir).join("huggingface")
            },
            PathBuf::from,
        );
        let endpoint = variable("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.to_owned());
        let token = variable("HF_TOKEN").or_else(|| Cache::new(home.join("hub")).token());
        let offline = variable("HF_HUB_OFFLINE").is_some_and(|value| matches!(value.to_ascii_lowercase().as_str(), "1" | "on" | "yes" | "true"));
        Self::new(home, endpoint, token, offline)
    }

    /// Folder in which a hand-made copy of `repository` is found.
    pub(crate) fn place(&self, repository: &Repository) -> PathBuf {
        self.folder(repository).join("snapshots").join(&repository.revision)
    }

    /// What `repository` holds: by the hub, or by the cache where the hub cannot be reached or must not be asked.
    pub(crate) fn list(&self, repository: &Repository) -> Result<Listing, DataError> {
        let reason = if self.offline {
            "HF_HUB_OFFLINE is set".to_owned()
        } else {
            match self.ask(repository) {
                Ok(info) => {
                    let mut files: Vec<String> =
                        info.siblings.into_iter().map(|sibling| sibling.rfilename).filter(|file| stays_inside(file)).collect();
                    files.sort();
                    return Ok(Listing { files, snapshot: self.folder(repository).join("snapshots").join(info.sha), unreachable: None });
                }
                Err(failure) => self.network_failure(failure, &repository.to_string())?,
            }
        };
        let Some(snapshot) = self.cached_snapshot(repository) else {
            return Err(DataError::NoNetwork {
                what: repository.to_string(),
                reason,
                hints: vec![format!("put its files into {}", self.place(repository).display())],
            });
        };
        let mut files = Vec::new();
        collect(&snapshot, "", &mut files);
        files.sort();
        Ok(Listing { files, snapshot, unreachable: Some(reason) })
    }

    /// Path of `file` on this machine; fetched if need be.
    pub(crate) fn fetch(&self, repository: &Repository, listing: &Listing, file: &str) -> Result<PathBuf, DataError> {
        let path = listing.snapshot.join(file);
        if path.exists() {
            return Ok(path);
        }
        let what = format!("{file} of {repository}");
        let reason = match &listing.unreachable {
            Some(reason) => reason.clone(),
            None => match self.api(repository).and_then(|api| api.download(file)) {
                Ok(path) => return Ok(path),
                Err(error) => self.network_failure(Failure::Api(error), &what)?,
            },
        };
        Err(DataError::NoNetwork { what, reason, hints: vec![format!("put it into {}", path.display())] })
    }

    fn folder(&self, repository: &Repository) -> PathBuf {
        self.home.join("hub").join(repository.repo().folder_name())
    }

    /// The snapshot that the cache's reference names, or one named as the revision itself (put there by hand), or the only one there is.
    fn cached_snapshot(&self, repository: &Repository) -> Option<PathBuf> {
        let snapshots = self.folder(repository).join("snapshots");
        let referenced =
            std::fs::read_to_string(self.folder(repository).join("refs").join(&repository.revision)).ok().map(|commit| snapshots.join(commit.trim()));
        let by_name = Some(snapshots.join(&repository.revision));
        referenced.into_iter().chain(by_name).find(|snapshot| snapshot.is_dir()).or_else(|| {
            let mut all = std::fs::read_dir(&snapshots).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
            let only = all.next()?;
            (repository.revision == "main" && all.next().is_none()).then_some(only)
        })
    }

    fn api(&self, repository: &Repository) -> Result<ApiRepo, ApiError> {
        let api = ApiBuilder::from_cache(Cache::new(self.home.join("hub")))
            .with_endpoint(self.endpoint.clone())
            .with_token(self.token.clone())
            .with_progress(false)
            .with_retries(2)
            .with_user_agent("sweep", env!("CARGO_PKG_VERSION"))
            .build()?;
        Ok(api.repo(repository.repo()))
    }

    /// Asks the hub for a listing, on a thread of its own because `hf-hub` knows no timeout.
    fn ask(&self, repository: &Repository) -> Result<RepoInfo, Failure> {
        let api = self.api(repository).map_err(Failure::Api)?;
        let (answer, answers) = mpsc::channel();
        std::thread::spawn(move || answer.send(api.info()));
        answers.recv_timeout(ANSWER_WITHIN).map_err(|_| Failure::NoAnswer)?.map_err(Failure::Api)
    }

    /// What a failure means: an error where the hub answered, the reason where there is no network.
    fn network_failure(&self, failure: Failure, what: &str) -> Result<String, DataError> {
        let endpoint = &self.endpoint;
        let Failure::Api(mut error) = failure else {
            return Ok(format!("{endpoint} gave no answer in {} s", ANSWER_WITHIN.as_secs()));
        };
        while let ApiError::TooManyRetries(last) = error {
            error = *last;
        }
        match error {
            ApiError::RequestError(error) => match *error {
                ureq::Error::StatusCode(404) => Err(DataError::NotFound {
                    what: what.to_owned(),
                    reason: format!("{endpoint} does not have it"),
                    hints: vec!["check the spelling and the revision".to_owned()],
                }),
                ureq::Error::StatusCode(status @ (401 | 403)) => {
                    Err(DataError::NoAccess { what: what.to_owned(), endpoint: endpoint.clone(), status, with_token: self.token.is_some() })
                }
                ureq::Error::StatusCode(status) => Ok(format!("{endpoint} answered with HTTP status {status}")),
                error => Ok(format!("{endpoint} cannot be reached ({error})")),
            },
            error => Ok(format!("fetching from {endpoint} failed ({error})")),
        }
    }
}

/// Why the hub could not be asked.
#[derive(Debug)]
enum Failure {
    Api(ApiError),
    NoAnswer,
}

/// Whether a path from the network stays inside the folder it is joined to.
fn stays_inside(file: &str) -> bool {
    !file.is_empty() && Path::new(file).components().all(|component| matches!(component, Component::Normal(_)))
}

fn collect(folder: &Path, prefix: &str, files: &mut Vec<String>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        let path = entry.path();
        if path.is_dir() {
            collect(&path, &format!("{name}/"), files);
        } else if path.exists() {
            files.push(name);
        }
    }
}

/// Whether `text` can be the id of a repository: `name` or `owner/name`.
pub(crate) fn is_hub_id(text: &str) -> bool {
    let plain = |part: &str| {
        !part.is_empty() && !part.starts_with(['.', '-']) && part.chars().all(|letter| letter.is_ascii_alphanumeric() || "-_.".contains(letter))
    };
    let parts: Vec<&str> = text.split('/').collect();
    parts.len() <= 2 && parts.into_iter().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_honoured_and_the_token_is_never_shown() {
        let set = |name: &str| match name {
            "HF_HOME" => Some("/data/hf".to_owned()),
            "HF_ENDPOINT" => Some("http://mirror.example/".to_owned()),
            "HF_TOKEN" => Some("hf_secret".to_owned()),
            "HF_HUB_OFFLINE" => Some("TRUE".to_owned()),
            _ => None,
        };
        let hub = Hub::from_variables(set);
        assert_eq!((hub.home.as_path(), hub.endpoint.as_str(), hub.offline), (Path::new("/data/hf"), "http://mirror.example", true));
        assert_eq!(hub.token.as_deref(), Some("hf_secret"));
        assert_eq!(format!("{hub:?}"), r#"Hub { home: "/data/hf", endpoint: "http://mirror.example", token: "set", offline: true }"#);
        let hub = Hub::from_variables(|name| (name == "HOME").then(|| "/home/anna".to_owned()));
        assert_eq!((hub.home.as_path(), hub.endpoint.as_str(), hub.offline), (Path::new("/home/anna/.cache/huggingface"), DEFAULT_ENDPOINT, false));
        assert_eq!(hub.token, None);
    }

    #[test]
    fn only_ids_and_paths_inside_pass() {
        for (text, is_id) in [
            ("gpt2", true),
            ("openai-community/gpt2", true),
            ("a/b/c", false),
            ("./gpt2", false),
            ("/a/b", false),
            ("a b", false),
            ("", false),
            ("a/", false),
        ] {
            assert_eq!(is_hub_id(text), is_id, "{text}");
        }
        for (file, inside) in [("a/b.parquet", true), ("../a", false), ("a/../../b", false), ("/etc/passwd", false), ("", false)] {
            assert_eq!(stays_inside(file), inside, "{file}");
        }
    }
}
