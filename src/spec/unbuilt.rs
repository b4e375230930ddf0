//! Valid keys and tables whose feature is not built yet: refused by name with the reason, never ignored. A row leaves this table when it is built.

use super::schema::Key;
use super::value::Value;

/// Tables that are not built, and what they would do.
pub(crate) const TABLES: [(&str, &str); 2] =
    [("peft", "training adapters instead of all parameters"), ("runner", "running training programs other than sweep's own")];

/// Keys that are not built: path, the values that are refused (none: all of them), and what they would do.
const KEYS: [(&str, &[&str], &str); 2] =
    [("model.attn_implementation", &["flash"], "fused attention"), ("report.columns", &[], "choosing the tables' columns")];

/// Why a value is refused, if its feature is not built.
pub(crate) fn refusal(key: &Key, value: &Value) -> Option<String> {
    let (path, values, feature) = KEYS.iter().find(|(path, ..)| *path == key.path)?;
    if values.is_empty() {
        return Some(format!("`{path}` is not built yet: {feature}"));
    }
    let written = value.to_string();
    values.contains(&written.as_str()).then(|| format!("`{path} = {written}` is not built yet: {feature}"))
}
