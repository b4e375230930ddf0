//! The JSON schemas of request, messages and result are kept in `tests/schema/`: they are current, and what a trial really writes is valid by them.

use std::fs;
use std::path::Path;

use schemars::{Schema, schema_for};
use serde_json::Value;
use sweep::protocol::{Message, TrialRequest, TrialResult};

use crate::world::{TWO_CASES, World};

/// Writes the schemas anew instead of comparing them: `UPDATE_SCHEMAS=1 cargo test --no-default-features --test it schema`.
const UPDATE: &str = "UPDATE_SCHEMAS";

fn schemas() -> [(&'static str, Schema); 3] {
    [("request", schema_for!(TrialRequest)), ("message", schema_for!(Message)), ("result", schema_for!(TrialResult))]
}

#[test]
fn schemas_are_current() {
    for (name, schema) in schemas() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/schema/{name}.schema.json"));
        let text = format!("{}\n", serde_json::to_string_pretty(&schema).unwrap());
        if std::env::var_os(UPDATE).is_some() {
            fs::write(&path, text).unwrap();
        } else {
            let kept = fs::read_to_string(&path).unwrap_or_default();
            assert!(kept == text, "{} is not current; write it anew with {UPDATE}=1", path.display());
        }
    }
}

#[test]
fn what_trials_write_is_valid() {
    let world = World::new(TWO_CASES);
    world.run(&[]).with_code(0);
    let validators = schemas().map(|(_, schema)| jsonschema::validator_for(schema.as_value()).unwrap());
    let [request, message, result] = validators;
    let mut seen = [0; 3];
    for trial in world.state().trials.values() {
        let attempt = world.newest().attempt(&trial.record.id, 1);
        let read = |path: &Path| -> Value { serde_json::from_slice(&fs::read(path).unwrap()).unwrap() };
        request.validate(&read(&attempt.request())).unwrap();
        seen[0] += 1;
        for line in fs::read_to_string(attempt.messages()).unwrap().lines() {
            message.validate(&serde_json::from_str(line).unwrap()).unwrap();
            seen[1] += 1;
        }
        if attempt.result().exists() {
            result.validate(&read(&attempt.result())).unwrap();
            seen[2] += 1;
        }
    }
    assert!(seen.iter().all(|count| *count > 1), "{seen:?}");
    let broken: Value = serde_json::json!({"at": "2026-01-01T00:00:00Z", "kind": "step", "step": "one"});
    assert!(message.validate(&broken).is_err(), "the schema refuses nothing");
}
