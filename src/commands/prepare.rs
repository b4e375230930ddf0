//! Between plan and run: finding, fetching and checking the models and data that the rows name.

use super::plan::refused;
use crate::data::{self, Cache, DataError, Hub};
use crate::error::CommandError;
use crate::protocol::ResolvedModel;
use crate::spec::check::{Facts, check};
use crate::spec::ids::{ContentHashes, configuration_id};
use crate::spec::plan::SweepPlan;
use crate::store::ManifestRow;

/// The rows of a plan with everything they name at hand.
pub(super) struct PreparedRows {
    /// In order.
    pub(super) rows: Vec<ManifestRow>,
    /// The model of each row.
    pub(super) models: Vec<ResolvedModel>,
    /// What the user should know, the plan's own notices among them; a sentence each.
    pub(super) notices: Vec<String>,
}

/// Fetches and tokenises what the rows name, each thing once, and holds the rows against it.
pub(super) fn prepare(plan: &SweepPlan, host_memory_bytes: u64) -> Result<PreparedRows, CommandError> {
    let mut facts = Facts { host_memory_bytes: Some(host_memory_bytes).filter(|bytes| *bytes > 0), ..Facts::default() };
    // What is wrong without looking anything up is said before anything is fetched.
    refused(plan, &check(plan, &facts))?;
    let (hub, cache) = (Hub::from_environment(), Cache::from_environment());
    let mut prepared = PreparedRows { rows: Vec::new(), models: Vec::new(), notices: plan.notices.clone() };
    let mut found: Vec<ResolvedModel> = Vec::new();
    for row in plan.rows.iter() {
        // Switches that cannot matter are FSDP's alone: rows that share a configuration share model and data as written.
        let asked = (&row.settings.model, &row.settings.data);
        let place = match facts.data.iter().position(|(model, data, _)| (model, data) == asked) {
            Some(place) => place,
            None => {
                let ready = data::prepare(asked.1, asked.0, &hub, &cache).map_err(data_error)?;
                let model = data::model::resolve(asked.0, ready.data.vocab_size, &hub).map_err(data_error)?;
                prepared.notices.extend(ready.notices);
                facts.models.push((asked.0.clone(), model.architecture.clone()));
                facts.data.push((asked.0.clone(), asked.1.clone(), ready.data));
                found.push(model);
                found.len() - 1
            }
        };
        let (data, model) = (facts.data[place].2.clone(), found[place].clone());
        let configuration = configuration_id(&row.effective, &ContentHashes::of(&model, &data));
        prepared.rows.push(ManifestRow { row, configuration, data });
        prepared.models.push(model);
    }
    refused(plan, &check(plan, &facts))?;
    Ok(prepared)
}

fn data_error(error: DataError) -> CommandError {
    error.hints().into_iter().fold(CommandError::user(error.to_string()), CommandError::hint)
}
