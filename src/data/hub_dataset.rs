//! Data sets on the hub: which of a repository's files are the training and the evaluation split.

use std::path::{Path, PathBuf};

use super::error::DataError;
use super::hub::{Hub, Repository, is_hub_id};
use super::text::Format;

/// A data set as a sweep file names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubDataset {
    repository: Repository,
    /// One of several data sets in the repository.
    configuration: Option<String>,
}

/// Its files on this machine.
#[derive(Debug)]
pub(crate) struct SplitFiles {
    /// Training split.
    pub(crate) train: Vec<PathBuf>,
    /// Validation split; empty where there is none.
    pub(crate) eval: Vec<PathBuf>,
    /// What the user should know.
    pub(crate) notices: Vec<String>,
}

/// Names inside the repository.
#[derive(Debug, Default, PartialEq, Eq)]
struct Chosen {
    train: Vec<String>,
    eval: Vec<String>,
}

impl HubDataset {
    /// `wikitext-2-v1` and its kin, `owner/name`, or `owner/name/configuration`.
    pub(crate) fn parse(name: &str) -> Result<Self, DataError> {
        if matches!(name, "wikitext-2-v1" | "wikitext-2-raw-v1" | "wikitext-103-v1" | "wikitext-103-raw-v1") {
            return Ok(Self { repository: Repository::dataset("Salesforce/wikitext"), configuration: Some(name.to_owned()) });
        }
        let mut parts = name.splitn(3, '/');
        let id = [parts.next(), parts.next()].into_iter().flatten().collect::<Vec<_>>().join("/");
        let configuration = parts.next().map(str::to_owned);
        if !is_hub_id(&id) || configuration.as_ref().is_some_and(|configuration| !is_hub_id(configuration)) {
            return Err(DataError::BadSetting {
                setting: "data.dataset",
                reason: format!("\"{name}\" is not the name of a data set on the hub"),
                hint: Some(format!("for text files write dataset = {{ train = \"{name}\", eval = \"...\" }}")),
            });
        }
        Ok(Self { repository: Repository::dataset(&id), configuration })
    }

    /// Finds its files, fetching what the cache lacks.
    pub(crate) fn fetch(&self, hub: &Hub) -> Result<SplitFiles, DataError> {
        self.try_fetch(hub).map_err(|error| self.explain(hub, error))
    }

    fn try_fetch(&self, hub: &Hub) -> Result<SplitFiles, DataError> {
        let listing = hub.list(&self.repository)?;
        let mut chosen = choose(&listing.files, self.configuration.as_deref()).map_err(|reason| match &listing.unreachable {
            Some(unreachable) => {
                DataError::NoNetwork { what: self.to_string(), reason: format!("{unreachable}, and in the cache {reason}"), hints: Vec::new() }
            }
            None => DataError::NotFound { what: format!("training split of {self}"), reason, hints: Vec::new() },
        })?;
        let mut notices = Vec::new();
        if let Some(unreachable) = &listing.unreachable {
            notices.push(format!("{self} is taken from the cache: {unreachable}"));
            // Of these we know that a validation split exists; the cache lacks it.
            if chosen.eval.is_empty() && self.repository.id == "Salesforce/wikitext" {
                chosen.eval.push(format!("{}/validation-00000-of-00001.parquet", self.configuration.as_deref().unwrap_or_default()));
            }
        }
        if chosen.eval.is_empty() {
            notices.push(format!("{self} has no validation split: nothing is evaluated"));
        }
        let get = |files: &[String]| files.iter().map(|file| hub.fetch(&self.repository, &listing, file)).collect::<Result<Vec<_>, _>>();
        Ok(SplitFiles { train: get(&chosen.train)?, eval: get(&chosen.eval)?, notices })
    }

    /// Says what to put where, and what to use instead, where there is no network.
    fn explain(&self, hub: &Hub, error: DataError) -> DataError {
        match error {
            DataError::NoNetwork { what, reason, .. } => {
                let place = hub.place(&self.repository).join(self.configuration.as_deref().unwrap_or_default());
                DataError::NoNetwork {
                    what,
                    reason,
                    hints: vec![
                        format!("put its parquet files (train-00000-of-00001.parquet, validation-00000-of-00001.parquet) into {}", place.display()),
                        "or use text files: --set 'data.dataset={ train = \"train.txt\", eval = \"eval.txt\" }'".to_owned(),
                    ],
                }
            }
            error => error,
        }
    }
}

impl std::fmt::Display for HubDataset {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.repository.fmt(formatter)?;
        self.configuration.as_ref().map_or(Ok(()), |configuration| write!(formatter, " ({configuration})"))
    }
}

/// Chooses the files of both splits; the error says what is there instead.
fn choose(files: &[String], configuration: Option<&str>) -> Result<Chosen, String> {
    let mut of_configuration: Vec<(&str, &str)> = files.iter().map(|file| split_configuration(file)).filter(|(_, file)| is_data(file)).collect();
    if let Some(wanted) = configuration {
        of_configuration.retain(|(found, _)| *found == wanted);
    }
    let train: Vec<_> = of_configuration.iter().filter(|(_, file)| split_of(file) == Some(Split::Train)).collect();
    let mut configurations: Vec<&str> = train.iter().map(|(configuration, _)| *configuration).collect();
    configurations.sort_unstable();
    configurations.dedup();
    let chosen = match configurations[..] {
        [] => {
            let mut there: Vec<&str> = files.iter().map(|file| split_configuration(file).0).filter(|found| !found.is_empty()).collect();
            there.dedup();
            return Err(match configuration {
                Some(wanted) if !there.contains(&wanted) => {
                    format!("there is no {wanted}{}", if there.is_empty() { String::new() } else { format!(", only {}", there.join(", ")) })
                }
                _ => "no file (.parquet, .jsonl, .txt) is named after it".to_owned(),
            });
        }
        [only] => only,
        [first, ..] if first.is_empty() || first == "default" => first,
        _ => return Err(format!("it holds several data sets ({}): add one to its name after a slash", configurations.join(", "))),
    };
    let format = |file: &str| Format::of(Path::new(file));
    // The same data set is often there in several formats; one of them is enough.
    let best = train.iter().filter(|(found, _)| *found == chosen).map(|(_, file)| rank(format(file))).min();
    let of = |split: Split| {
        files
            .iter()
            .filter(|file| {
                let (found, rest) = split_configuration(file);
                found == chosen && is_data(rest) && split_of(rest) == Some(split) && Some(rank(format(rest))) == best
            })
            .cloned()
            .collect()
    };
    Ok(Chosen { train: of(Split::Train), eval: of(Split::Validation) })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Split {
    Train,
    Validation,
    Test,
}

/// The configuration is the folder a file lies in, unless that is named `data` or after a split; the rest is the path below it.
fn split_configuration(file: &str) -> (&str, &str) {
    let file = file.strip_prefix("data/").unwrap_or(file);
    match file.split_once('/') {
        Some((folder, rest)) if split_of(folder).is_none() => (folder, rest),
        _ => ("", file),
    }
}

/// The split that a path names last.
fn split_of(path: &str) -> Option<Split> {
    path.split(|letter: char| !letter.is_ascii_alphanumeric()).rev().find_map(|word| match word.to_ascii_lowercase().as_str() {
        "train" | "training" => Some(Split::Train),
        "validation" | "valid" | "val" | "dev" | "eval" => Some(Split::Validation),
        "test" => Some(Split::Test),
        _ => None,
    })
}

fn is_data(file: &str) -> bool {
    let extension = Path::new(file).extension().and_then(|extension| extension.to_str());
    matches!(extension, Some("parquet" | "jsonl" | "ndjson" | "txt" | "raw" | "tokens"))
}

fn rank(format: Format) -> u8 {
    match format {
        Format::Parquet => 0,
        Format::JsonLines => 1,
        Format::Plain => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(files: &[&str], configuration: Option<&str>) -> Result<(Vec<String>, Vec<String>), String> {
        let files: Vec<String> = files.iter().map(|file| (*file).to_owned()).collect();
        choose(&files, configuration).map(|chosen| (chosen.train, chosen.eval))
    }

    fn owned(files: &[&str]) -> Vec<String> {
        files.iter().map(|file| (*file).to_owned()).collect()
    }

    #[test]
    fn splits_are_found_by_name() {
        let wikitext = [
            ".gitattributes",
            "README.md",
            "wikitext-103-v1/train-00000-of-00002.parquet",
            "wikitext-2-raw-v1/test-00000-of-00001.parquet",
            "wikitext-2-raw-v1/train-00000-of-00001.parquet",
            "wikitext-2-raw-v1/validation-00000-of-00001.parquet",
        ];
        let expected = (owned(&["wikitext-2-raw-v1/train-00000-of-00001.parquet"]), owned(&["wikitext-2-raw-v1/validation-00000-of-00001.parquet"]));
        assert_eq!(chosen(&wikitext, Some("wikitext-2-raw-v1")), Ok(expected));
        assert_eq!(chosen(&wikitext, Some("wikitext-3")), Err("there is no wikitext-3, only wikitext-103-v1, wikitext-2-raw-v1".to_owned()));
        assert_eq!(
            chosen(&wikitext, None),
            Err("it holds several data sets (wikitext-103-v1, wikitext-2-raw-v1): add one to its name after a slash".to_owned())
        );
        let plain = ["data/train-0.parquet", "data/train-1.parquet", "data/dev.parquet", "train.txt"];
        assert_eq!(chosen(&plain, None), Ok((owned(&["data/train-0.parquet", "data/train-1.parquet"]), owned(&["data/dev.parquet"]))));
        assert_eq!(chosen(&["stories_train.txt", "stories_valid.txt"], None), Ok((owned(&["stories_train.txt"]), owned(&["stories_valid.txt"]))));
        assert_eq!(chosen(&["train/a.jsonl", "test/a.jsonl"], None), Ok((owned(&["train/a.jsonl"]), vec![])));
        assert_eq!(chosen(&["README.md"], None), Err("no file (.parquet, .jsonl, .txt) is named after it".to_owned()));
    }

    #[test]
    fn names_are_parsed() {
        let parse = |name| HubDataset::parse(name).map(|dataset| dataset.to_string()).map_err(|error| error.to_string());
        assert_eq!(parse("wikitext-2-v1").unwrap(), "data set Salesforce/wikitext (wikitext-2-v1)");
        assert_eq!(parse("roneneldan/TinyStories").unwrap(), "data set roneneldan/TinyStories");
        assert_eq!(parse("allenai/c4/en").unwrap(), "data set allenai/c4 (en)");
        assert_eq!(parse("./notes.txt").unwrap_err(), "data.dataset: \"./notes.txt\" is not the name of a data set on the hub");
    }
}
