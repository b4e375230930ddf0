//! Values of the sweep file: what a key accepts, how a TOML value becomes one, and how it is written back. The only place that decides types.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeFloat, DeInteger, DeTable, DeValue};

use super::mistakes::{list, nearest};
use super::settings::{DType, Dataset, MixedPrecision, ReshardAfterForward, Tokenizer};
use super::slurm::{self, SbatchOption};

/// What a key accepts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    Bool,
    /// A whole number of at least this.
    Integer(u64),
    /// One of these whole numbers.
    Among(&'static [u64]),
    Number(Bounds),
    /// Any text but the empty one.
    Text,
    /// Text that fits on one line.
    Line,
    /// Lines of a shell script.
    Lines,
    /// Options of `sbatch`.
    SbatchOptions,
    /// One of these names.
    Choice(&'static [&'static str]),
    /// Bytes, written as text with a unit.
    Size,
    /// A time of at least this many milliseconds, written as text with a unit.
    Duration(u64),
    /// A regular expression.
    Regex,
    /// A list of block sizes.
    BlockSizes,
    Dataset,
    Tokenizer,
    MixedPrecision,
    Reshard,
}

/// Which numbers are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bounds {
    /// Above 0.
    Positive,
    /// 0 or above.
    NonNegative,
    /// 0 or above, below 1.
    BelowOne,
}

/// A typed value. Equal values of one key are the same setting, however they were written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Bool(bool),
    Integer(u64),
    Number(f64),
    Text(String),
    Choice(&'static str),
    Size(u64),
    Duration(Duration),
    Integers(Vec<u64>),
    Lines(Vec<String>),
    SbatchOptions(Vec<SbatchOption>),
    Dataset(Dataset),
    Tokenizer(Tokenizer),
    MixedPrecision(MixedPrecision),
    Reshard(ReshardAfterForward),
}

/// A value that was refused: which part of it, why, and what is accepted.
#[derive(Debug)]
pub(crate) struct Refused {
    pub(crate) span: Range<usize>,
    pub(crate) message: String,
    pub(crate) help: Vec<String>,
}

impl Refused {
    pub(super) fn new(span: Range<usize>, message: impl Into<String>) -> Self {
        Self { span, message: message.into(), help: Vec::new() }
    }

    pub(super) fn help(mut self, help: impl Into<String>) -> Self {
        self.help.push(help.into());
        self
    }
}

/// Taking a value apart. The schema has typed it, so another kind here is a defect of the schema's table, which its tests look for.
macro_rules! accessor {
    ($name:ident, $variant:ident, $type:ty, $value:ident => $result:expr) => {
        pub(crate) fn $name(&self) -> $type {
            match self {
                Self::$variant($value) => $result,
                other => unreachable!("the schema typed {other:?} as something else"),
            }
        }
    };
}

impl Value {
    accessor!(bool, Bool, bool, value => *value);
    accessor!(integer, Integer, u64, value => *value);
    accessor!(number, Number, f64, value => *value);
    accessor!(text, Text, String, value => value.clone());
    accessor!(choice, Choice, &'static str, value => value);
    accessor!(size, Size, u64, value => *value);
    accessor!(duration, Duration, Duration, value => *value);
    accessor!(integers, Integers, &[u64], value => value);
    accessor!(lines, Lines, Vec<String>, value => value.clone());
    accessor!(sbatch_options, SbatchOptions, Vec<SbatchOption>, value => value.clone());
    accessor!(dataset, Dataset, Dataset, value => value.clone());
    accessor!(tokenizer, Tokenizer, Tokenizer, value => value.clone());
    accessor!(mixed_precision, MixedPrecision, MixedPrecision, value => *value);
    accessor!(reshard, Reshard, ReshardAfterForward, value => *value);

    /// A whole number as a length.
    pub(crate) fn count(&self) -> usize {
        usize::try_from(self.integer()).unwrap_or(usize::MAX)
    }
}

/// Labels are the block's own tokens shifted inside it, so that a block of one token has nothing to learn from.
pub(crate) const LEAST_BLOCK_SIZE: u64 = 2;

impl Kind {
    /// Whether one value of this kind is a list.
    pub(crate) fn is_list(self) -> bool {
        matches!(self, Self::BlockSizes | Self::Lines)
    }

    /// What is accepted, to follow "expected".
    pub(crate) fn expected(self) -> String {
        match self {
            Self::Bool => "`true` or `false`".to_owned(),
            Self::Integer(0) => "a whole number".to_owned(),
            Self::Integer(least) => format!("a whole number of at least {least}"),
            Self::Among(numbers) => format!("one of {}", numbers.iter().map(u64::to_string).collect::<Vec<_>>().join(", ")),
            Self::Number(Bounds::Positive) => "a number above 0".to_owned(),
            Self::Number(Bounds::NonNegative) => "a number of at least 0".to_owned(),
            Self::Number(Bounds::BelowOne) => "a number from 0 to below 1".to_owned(),
            Self::Text | Self::Line => "text in quotes".to_owned(),
            Self::Lines => "a list of lines of a shell script, each in quotes".to_owned(),
            Self::SbatchOptions => "a table of options of sbatch, such as { exclusive = true, mail-type = \"END\" }".to_owned(),
            Self::Choice(names) => format!("one of {}", names.iter().map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ")),
            Self::Size => "a size with its unit in quotes, such as \"16GiB\"".to_owned(),
            Self::Duration(least) => {
                let least =
                    if least > 0 { format!(" of at least {}", humantime::format_duration(Duration::from_millis(least))) } else { String::new() };
                format!("a time{least} with its unit in quotes, such as \"200ms\" or \"4h\"")
            }
            Self::Regex => "a regular expression in quotes".to_owned(),
            Self::BlockSizes => format!("a list of whole numbers of at least {LEAST_BLOCK_SIZE}"),
            Self::Dataset => "a data set's name in quotes, { train = \"a.txt\", eval = \"b.txt\" }, { synthetic = { .. } } or { token_blocks = \
                              \"x.safetensors\", eval_blocks = \"y.safetensors\" }"
                .to_owned(),
            Self::Tokenizer => "a hub id, file or folder in quotes, or { train_bpe = 1024 }".to_owned(),
            Self::MixedPrecision => "\"no\", \"fp16\", \"bf16\" or { param_dtype, reduce_dtype, buffer_dtype }".to_owned(),
            Self::Reshard => "`true`, `false` or a number of ranks".to_owned(),
        }
    }

    /// Types a TOML value.
    pub(crate) fn read(self, value: &Spanned<DeValue<'_>>) -> Result<Value, Refused> {
        let span = value.span();
        match (self, value.get_ref()) {
            (Self::Bool, DeValue::Boolean(value)) => Ok(Value::Bool(*value)),
            (Self::Integer(least), DeValue::Integer(value)) => whole(value, least, &span).map(Value::Integer),
            (Self::Among(numbers), DeValue::Integer(value)) => match whole(value, 0, &span)? {
                number if numbers.contains(&number) => Ok(Value::Integer(number)),
                number => Err(self.refuse(span, &format!("{number} is not a valid value"))),
            },
            (Self::Number(bounds), DeValue::Integer(value)) => number(value.as_str().parse().ok().filter(|_| value.radix() == 10), bounds, &span),
            (Self::Number(bounds), DeValue::Float(value)) => number(float(value), bounds, &span),
            (Self::Text, DeValue::String(value)) => text(value, &span).map(Value::Text),
            (Self::Line, DeValue::String(value)) => slurm::line(value, &span).map(Value::Text),
            (Self::Lines, DeValue::Array(values)) => slurm::read_lines(values).map(Value::Lines),
            (Self::SbatchOptions, DeValue::Table(table)) => slurm::read_options(table).map(Value::SbatchOptions),
            (Self::Regex, DeValue::String(value)) => match regex::Regex::new(value) {
                Ok(_) => text(value, &span).map(Value::Text),
                Err(error) => Err(Refused::new(span, "not a regular expression").help(error.to_string().lines().last().unwrap_or_default().trim())),
            },
            (Self::Choice(names), DeValue::String(value)) => match names.iter().find(|name| *name == value) {
                Some(name) => Ok(Value::Choice(name)),
                None => Err(unknown_name(value, names, self, span)),
            },
            (Self::Size, DeValue::String(value)) => parse_size(value).map(Value::Size).map_err(|reason| self.refuse(span, &reason)),
            (Self::Duration(least), DeValue::String(value)) => match humantime::parse_duration(value) {
                Ok(duration) if duration >= Duration::from_millis(least) => Ok(Value::Duration(duration)),
                Ok(_) => Err(self.refuse(span, &format!("\"{value}\" is too short"))),
                Err(_) => Err(self.refuse(span, &format!("\"{value}\" is not a time"))),
            },
            (Self::BlockSizes, DeValue::Array(values)) => {
                if values.is_empty() {
                    return Err(self.refuse(span, "the list is empty"));
                }
                let read = values.iter().map(|value| match Self::Integer(LEAST_BLOCK_SIZE).read(value)? {
                    Value::Integer(value) => Ok(value),
                    _ => Err(self.refuse(value.span(), "not a whole number")),
                });
                read.collect::<Result<Vec<_>, _>>().map(Value::Integers)
            }
            (Self::Dataset, DeValue::String(value)) => text(value, &span).map(|name| Value::Dataset(Dataset::Hub(name))),
            (Self::Dataset, DeValue::Table(table)) => dataset(table, span).map(Value::Dataset),
            (Self::Tokenizer, DeValue::String(value)) => text(value, &span).map(|source| Value::Tokenizer(Tokenizer::Source(source))),
            (Self::Tokenizer, DeValue::Table(table)) => {
                let fields = Fields::new(table, &["train_bpe"])?;
                // 256 bytes and the end of the text are always in a byte-level vocabulary.
                let size = fields.integer("train_bpe", 257, None, &span)?;
                Ok(Value::Tokenizer(Tokenizer::TrainBpe(usize::try_from(size).unwrap_or(usize::MAX))))
            }
            (Self::MixedPrecision, DeValue::String(value)) => match &**value {
                "no" => Ok(Value::MixedPrecision(MixedPrecision::uniform(DType::Fp32))),
                "fp16" => Ok(Value::MixedPrecision(MixedPrecision::uniform(DType::Fp16))),
                "bf16" => Ok(Value::MixedPrecision(MixedPrecision::uniform(DType::Bf16))),
                "fp8" => Err(Refused::new(span, "mixed_precision = \"fp8\" is not built: it needs hardware and kernels that sweep has not")
                    .help(format!("expected {}", self.expected()))),
                _ => Err(unknown_name(value, &["no", "fp16", "bf16"], self, span)),
            },
            (Self::MixedPrecision, DeValue::Table(table)) => mixed_precision(table, span).map(Value::MixedPrecision),
            (Self::Reshard, DeValue::Boolean(value)) => Ok(Value::Reshard(ReshardAfterForward::Flag(*value))),
            (Self::Reshard, DeValue::Integer(value)) => {
                whole(value, 1, &span).map(|ranks| Value::Reshard(ReshardAfterForward::Ranks(usize::try_from(ranks).unwrap_or(usize::MAX))))
            }
            (_, other) => Err(self.mistyped(other, span)),
        }
    }

    fn refuse(self, span: Range<usize>, message: &str) -> Refused {
        Refused::new(span, message).help(format!("expected {}", self.expected()))
    }

    /// The value has another type; where only its quotes are wrong, say so.
    fn mistyped(self, value: &DeValue<'_>, span: Range<usize>) -> Refused {
        let refused = self.refuse(span, &format!("this is {}", type_of(value)));
        match (self, value) {
            (Self::Bool, DeValue::String(text)) if matches!(&**text, "true" | "false") => refused.help(format!("write {text} without quotes")),
            (Self::Integer(_) | Self::Among(_) | Self::Number(_), DeValue::String(text)) if text.parse::<f64>().is_ok() => {
                refused.help(format!("write {text} without quotes"))
            }
            (Self::Integer(_), DeValue::Float(number)) => match float(number) {
                Some(value) if value.fract() == 0.0 && (0.0..1e15).contains(&value) => refused.help(format!("write {value:.0}")),
                _ => refused,
            },
            (Self::Text | Self::Line | Self::Choice(_), DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_)) => {
                refused.help("put it in quotes")
            }
            (Self::Size, DeValue::Integer(number)) => refused.help(format!("bytes are written \"{}B\"", number.as_str())),
            (Self::Duration(_), DeValue::Integer(number)) => refused.help(format!("seconds are written \"{}s\"", number.as_str())),
            _ => refused,
        }
    }
}

/// The type of a TOML value, with its article.
pub(crate) fn type_of(value: &DeValue<'_>) -> String {
    let article = if matches!(value, DeValue::Integer(_) | DeValue::Array(_)) { "an" } else { "a" };
    format!("{article} {}", value.type_str())
}

fn float(value: &DeFloat<'_>) -> Option<f64> {
    value.as_str().parse().ok()
}

fn whole(value: &DeInteger<'_>, least: u64, span: &Range<usize>) -> Result<u64, Refused> {
    let kind = Kind::Integer(least);
    let parsed = i128::from_str_radix(value.as_str(), value.radix()).ok();
    match parsed.and_then(|parsed| u64::try_from(parsed).ok()) {
        // Lengths and seeds are handed on through signed types; no setting needs more.
        Some(parsed) if parsed >= least && parsed <= i64::MAX as u64 => Ok(parsed),
        Some(parsed) if parsed >= least => Err(kind.refuse(span.clone(), "the number is too large")),
        Some(_) => Err(kind.refuse(span.clone(), &format!("{value} is too small"))),
        None if value.as_str().starts_with('-') => Err(kind.refuse(span.clone(), &format!("{value} is negative"))),
        None => Err(kind.refuse(span.clone(), "the number is too large")),
    }
}

fn number(value: Option<f64>, bounds: Bounds, span: &Range<usize>) -> Result<Value, Refused> {
    let kind = Kind::Number(bounds);
    let Some(value) = value else { return Err(kind.refuse(span.clone(), "not a decimal number")) };
    let fits = value.is_finite()
        && match bounds {
            Bounds::Positive => value > 0.0,
            Bounds::NonNegative => value >= 0.0,
            Bounds::BelowOne => (0.0..1.0).contains(&value),
        };
    // Adding zero turns -0.0 into 0.0, so that both are one setting.
    if fits { Ok(Value::Number(value + 0.0)) } else { Err(kind.refuse(span.clone(), &format!("{value} is out of range"))) }
}

fn text(value: &str, span: &Range<usize>) -> Result<String, Refused> {
    if value.trim().is_empty() { Err(Refused::new(span.clone(), "the text is empty")) } else { Ok(value.to_owned()) }
}

fn unknown_name(value: &str, names: &[&'static str], kind: Kind, span: Range<usize>) -> Refused {
    let refused = kind.refuse(span, &format!("\"{value}\" is not a valid value"));
    match nearest(value, names.iter().copied()) {
        Some(name) => refused.help(format!("did you mean \"{name}\"?")),
        None => refused,
    }
}

/// Units of sizes; the binary ones are what memory is sold in.
const SIZE_UNITS: [(&str, u64); 9] = [
    ("B", 1),
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

fn parse_size(written: &str) -> Result<u64, String> {
    let trimmed = written.trim();
    let split = trimmed.find(|character: char| !character.is_ascii_digit() && character != '.').unwrap_or(trimmed.len());
    let (digits, unit) = (&trimmed[..split], trimmed[split..].trim());
    let Some((_, factor)) = SIZE_UNITS.iter().find(|(name, _)| *name == unit) else {
        return Err(if unit.is_empty() {
            format!("\"{written}\" has no unit")
        } else {
            let near = nearest(unit, SIZE_UNITS.iter().map(|(name, _)| *name)).map(|near| format!("; did you mean \"{digits}{near}\"?"));
            format!("\"{unit}\" is not a unit of size{}", near.unwrap_or_default())
        });
    };
    let bytes = digits.parse::<f64>().map_err(|_| format!("\"{written}\" is not a size"))? * *factor as f64;
    if bytes < 1.0 || bytes > i64::MAX as f64 { Err(format!("\"{written}\" is out of range")) } else { Ok(bytes as u64) }
}

/// The fields of an inline table whose names are known.
struct Fields<'a, 'i>(&'a DeTable<'i>);

impl<'a, 'i> Fields<'a, 'i> {
    fn new(table: &'a DeTable<'i>, names: &[&'static str]) -> Result<Self, Refused> {
        for key in table.keys() {
            if !names.contains(&&**key.get_ref()) {
                let refused =
                    Refused::new(key.span(), format!("unknown key `{}`", key.get_ref())).help(format!("allowed: {}", list(names.iter().copied())));
                return Err(match nearest(key.get_ref(), names.iter().copied()) {
                    Some(name) => refused.help(format!("did you mean `{name}`?")),
                    None => refused,
                });
            }
        }
        Ok(Self(table))
    }

    fn get(&self, name: &str) -> Option<&'a Spanned<DeValue<'i>>> {
        self.0.iter().find(|(key, _)| key.get_ref() == name).map(|(_, value)| value)
    }

    fn read(&self, name: &str, kind: Kind) -> Result<Option<Value>, Refused> {
        let Some(value) = self.get(name) else { return Ok(None) };
        kind.read(value).map(Some).map_err(|refused| Refused { message: format!("{name}: {}", refused.message), ..refused })
    }

    fn integer(&self, name: &'static str, least: u64, default: Option<u64>, whole: &Range<usize>) -> Result<u64, Refused> {
        let value = self.read(name, Kind::Integer(least))?.map(|value| value.integer());
        value.or(default).ok_or_else(|| Refused::new(whole.clone(), format!("`{name}` is missing")))
    }

    fn text(&self, name: &str) -> Result<Option<String>, Refused> {
        Ok(self.read(name, Kind::Text)?.map(|value| value.text()))
    }

    fn length(&self, name: &'static str, least: u64, default: u64, whole: &Range<usize>) -> Result<usize, Refused> {
        Ok(usize::try_from(self.integer(name, least, Some(default), whole)?).unwrap_or(usize::MAX))
    }
}

/// The embedded data's sizes where the file gives none: vocabulary, training tokens, evaluation tokens.
const SYNTHETIC: [u64; 3] = [1024, 262_144, 16_384];

fn dataset(table: &DeTable<'_>, span: Range<usize>) -> Result<Dataset, Refused> {
    let has = |name: &str| table.keys().any(|key| key.get_ref() == name);
    if has("synthetic") {
        let outer = Fields::new(table, &["synthetic"])?;
        let Some(inner) = outer.get("synthetic") else { return Err(Kind::Dataset.refuse(span, "the table is empty")) };
        let DeValue::Table(sizes) = inner.get_ref() else { return Err(Kind::Dataset.mistyped(inner.get_ref(), inner.span())) };
        let fields = Fields::new(sizes, &["vocab", "train_tokens", "eval_tokens"])?;
        let whole = inner.span();
        return Ok(Dataset::Synthetic {
            vocab: fields.length("vocab", 2, SYNTHETIC[0], &whole)?,
            train_tokens: fields.length("train_tokens", 1, SYNTHETIC[1], &whole)?,
            eval_tokens: fields.length("eval_tokens", 0, SYNTHETIC[2], &whole)?,
        });
    }
    if has("token_blocks") || has("eval_blocks") {
        let fields = Fields::new(table, &["token_blocks", "eval_blocks"])?;
        let Some(train) = fields.text("token_blocks")? else { return Err(Refused::new(span, "`token_blocks` is missing")) };
        return Ok(Dataset::TokenBlocks { train, eval: fields.text("eval_blocks")? });
    }
    if table.is_empty() {
        return Err(Kind::Dataset.refuse(span, "the table is empty"));
    }
    let fields = Fields::new(table, &["train", "eval", "synthetic", "token_blocks", "eval_blocks"])?;
    let Some(train) = fields.text("train")? else { return Err(Refused::new(span, "`train` is missing")) };
    Ok(Dataset::Files { train, eval: fields.text("eval")? })
}

const DTYPES: [&str; 3] = ["fp32", "fp16", "bf16"];

fn mixed_precision(table: &DeTable<'_>, span: Range<usize>) -> Result<MixedPrecision, Refused> {
    let fields = Fields::new(table, &["param_dtype", "reduce_dtype", "buffer_dtype"])?;
    if table.is_empty() {
        return Err(Kind::MixedPrecision.refuse(span, "the table is empty"));
    }
    let dtype = |name: &str| -> Result<Option<DType>, Refused> {
        Ok(fields.read(name, Kind::Choice(&DTYPES))?.map(|value| match value.choice() {
            "fp16" => DType::Fp16,
            "bf16" => DType::Bf16,
            _ => DType::Fp32,
        }))
    };
    // As PyTorch: reductions follow the parameters where nothing is said, buffers keep their own type.
    let param_dtype = dtype("param_dtype")?.unwrap_or(DType::Fp32);
    Ok(MixedPrecision {
        param_dtype,
        reduce_dtype: dtype("reduce_dtype")?.unwrap_or(param_dtype),
        buffer_dtype: dtype("buffer_dtype")?.unwrap_or(DType::Fp32),
    })
}

/// Written as in the sweep file, without quotes: for labels and messages.
impl fmt::Display for Value {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => value.fmt(formatter),
            Self::Integer(value) => value.fmt(formatter),
            Self::Number(value) if *value != 0.0 && (*value < 1e-3 || *value >= 1e9) => write!(formatter, "{value:e}"),
            Self::Number(value) => value.fmt(formatter),
            Self::Text(value) => value.fmt(formatter),
            Self::Choice(value) => value.fmt(formatter),
            Self::Size(bytes) => match SIZE_UNITS[..5].iter().rev().find(|(_, factor)| bytes % factor == 0) {
                Some((unit, factor)) => write!(formatter, "{}{unit}", bytes / factor),
                None => write!(formatter, "{bytes}B"),
            },
            Self::Duration(value) => humantime::format_duration(*value).fmt(formatter),
            Self::Lines(lines) => write!(formatter, "{lines:?}"),
            Self::SbatchOptions(options) => formatter.write_str(&options.iter().map(|option| option.name.as_str()).collect::<Vec<_>>().join(", ")),
            Self::Integers(values) => write!(formatter, "{values:?}"),
            Self::Dataset(Dataset::Hub(name)) => name.fmt(formatter),
            Self::Dataset(Dataset::Files { train, .. } | Dataset::TokenBlocks { train, .. }) => train.fmt(formatter),
            Self::Dataset(Dataset::Synthetic { .. }) => "synthetic".fmt(formatter),
            Self::Tokenizer(Tokenizer::Source(source)) => source.fmt(formatter),
            Self::Tokenizer(Tokenizer::TrainBpe(size)) => write!(formatter, "train_bpe {size}"),
            Self::MixedPrecision(precision) => {
                let MixedPrecision { param_dtype, reduce_dtype, buffer_dtype } = precision;
                match param_dtype {
                    DType::Fp32 if *precision == MixedPrecision::uniform(DType::Fp32) => "no".fmt(formatter),
                    dtype if *precision == MixedPrecision::uniform(*dtype) => dtype_name(*dtype).fmt(formatter),
                    _ => write!(formatter, "{}/{}/{}", dtype_name(*param_dtype), dtype_name(*reduce_dtype), dtype_name(*buffer_dtype)),
                }
            }
            Self::Reshard(ReshardAfterForward::Flag(value)) => value.fmt(formatter),
            Self::Reshard(ReshardAfterForward::Ranks(ranks)) => ranks.fmt(formatter),
        }
    }
}

/// As the sweep file spells it.
fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::Fp32 => "fp32",
        DType::Fp16 => "fp16",
        DType::Bf16 => "bf16",
    }
}
