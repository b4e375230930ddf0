//! From TOML to layers: the file, each of its profiles and each `--set` argument read and typed by the schema, with the place of everything kept.

use std::collections::BTreeMap;
use std::ops::Range;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::mistakes::{Mistakes, Origin, list, nearest};
use super::schema::{self, EXCLUSIVE, KEYS, Key, KeyIndex};
use super::unbuilt;
use super::value::{Kind, Value, type_of};

/// A value and where it was written.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Located {
    pub(crate) value: Value,
    pub(crate) origin: Origin,
}

/// A key with a list of values; without duplicates, never empty.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Axis {
    pub(crate) key: KeyIndex,
    pub(crate) values: Vec<Value>,
    /// Of the key.
    pub(crate) origin: Origin,
}

/// `[[case]]`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Case {
    pub(crate) label: Option<(String, Origin)>,
    pub(crate) origin: Origin,
    pub(crate) fixed: Vec<(KeyIndex, Located)>,
    pub(crate) axes: Vec<Axis>,
}

/// `[[exclude]]`
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Exclude {
    pub(crate) origin: Origin,
    pub(crate) entries: Vec<(KeyIndex, Located)>,
}

/// What one source says: the file without its profiles, one profile, or one `--set`.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Layer {
    pub(crate) scalars: BTreeMap<KeyIndex, Located>,
    pub(crate) axes: Vec<Axis>,
    pub(crate) cases: Option<Vec<Case>>,
    pub(crate) excludes: Option<Vec<Exclude>>,
    /// Where `[search.block_size]` stands, if it does.
    pub(crate) search: Option<Origin>,
    /// Keys given a list where one value is expected; only `--set` may do so, to replace an axis.
    pub(crate) lists: Vec<Axis>,
}

/// The sweep file, read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Document {
    pub(crate) base: Layer,
    pub(crate) profiles: Vec<(String, Layer)>,
}

/// Reads the sweep file. Mistakes do not stop it.
pub(crate) fn read_file(text: &str, mistakes: &mut Mistakes<'_>) -> Document {
    let (table, errors) = DeTable::parse_recoverable(text);
    for error in &errors {
        let span = error.span().unwrap_or(0..0);
        mistakes.add(&Origin::File(span), format!("not TOML: {}", error.message()));
    }
    if !errors.is_empty() {
        // What the parser made of broken TOML would be reported as mistakes that nobody made.
        return Document::default();
    }
    let reader = Reader { argument: None };
    let mut document = Document::default();
    for (name, value) in table.get_ref() {
        if name.get_ref() == "profile" {
            reader.profiles(value, &mut document, mistakes);
        } else {
            reader.top_entry(name, value, &mut document.base, mistakes);
        }
    }
    let profiles = document.profiles.iter().map(|(_, layer)| layer);
    for layer in profiles.chain([&document.base]) {
        check_layer(layer, mistakes);
    }
    document
}

/// Reads `--set` argument number `index`.
pub(crate) fn read_argument(index: usize, argument: &str, mistakes: &mut Mistakes<'_>) -> Layer {
    let origin = Origin::Argument(index);
    let mut layer = Layer::default();
    let Some((path, written)) = argument.split_once('=') else {
        mistakes.add(&origin, "no `=`").push("expected KEY=VALUE, such as train.max_steps=100".to_owned());
        return layer;
    };
    let (path, written) = (path.trim(), written.trim());
    let value = match DeValue::parse(written) {
        Ok(value) => value,
        Err(error) => {
            let help = mistakes.add(&origin, format!("the value is not TOML: {}", error.message()));
            if !written.is_empty() && !written.contains(['"', '\'', '[', '{']) {
                help.push(format!("text needs quotes that survive the shell: --set '{path}=\"{written}\"'"));
            }
            return layer;
        }
    };
    let reader = Reader { argument: Some(index) };
    let path = if path.contains('.') || schema::top_tables().contains(&path) {
        path.to_owned()
    } else {
        match schema::by_name(path, |_| true).as_slice() {
            [key] => KEYS[*key].path.to_owned(),
            [] => {
                let help = mistakes.add(&origin, format!("unknown key `{path}`"));
                if let Some(name) = nearest(path, KEYS.iter().map(Key::name)) {
                    help.push(format!("did you mean `{name}`?"));
                }
                return layer;
            }
            several => {
                let paths = list(several.iter().map(|key| KEYS[*key].path));
                mistakes.add(&origin, format!("`{path}` is ambiguous")).push(format!("say which one: {paths}"));
                return layer;
            }
        }
    };
    reader.set(&path, &value, &mut layer, mistakes);
    check_layer(&layer, mistakes);
    layer
}

/// Two keys of which a sweep has one, in one layer.
fn check_layer(layer: &Layer, mistakes: &mut Mistakes<'_>) {
    for (one, other) in EXCLUSIVE {
        if let (Some(first), Some(second)) = (layer.scalars.get(&schema::key(one)), layer.scalars.get(&schema::key(other))) {
            let elsewhere = mistakes.mention(&first.origin);
            mistakes.add(&second.origin, format!("`{other}` beside `{one}` ({elsewhere})")).push("keep one of the two".to_owned());
        }
    }
}

/// What a name below some table turned out to be.
enum Found {
    Key(KeyIndex),
    Table(String),
    Nothing,
}

struct Reader {
    /// Number of the `--set` argument, or `None` for the file.
    argument: Option<usize>,
}

impl Reader {
    fn origin(&self, span: Range<usize>) -> Origin {
        match self.argument {
            Some(number) => Origin::Argument(number),
            None => Origin::File(span),
        }
    }

    fn profiles(&self, value: &Spanned<DeValue<'_>>, document: &mut Document, mistakes: &mut Mistakes<'_>) {
        let Some(profiles) = self.table(value, "profile", mistakes) else { return };
        for (name, value) in profiles {
            let Some(table) = self.table(value, &format!("profile.{}", name.get_ref()), mistakes) else { continue };
            let mut layer = Layer::default();
            for (name, value) in table {
                if name.get_ref() == "profile" {
                    mistakes.add(&self.origin(name.span()), "a profile cannot hold profiles");
                } else {
                    self.top_entry(name, value, &mut layer, mistakes);
                }
            }
            document.profiles.push((name.get_ref().to_string(), layer));
        }
    }

    /// One entry at the top of the file or of a profile.
    fn top_entry(&self, name: &Spanned<std::borrow::Cow<'_, str>>, value: &Spanned<DeValue<'_>>, layer: &mut Layer, mistakes: &mut Mistakes<'_>) {
        let origin = self.origin(name.span());
        let name = &**name.get_ref();
        match name {
            "grid" => {
                let Some(table) = self.table(value, name, mistakes) else { return };
                let mut point = PointReader { reader: self, place: "[grid]", entries: Vec::new() };
                point.walk("", table, mistakes);
                for (key, origin, value) in point.entries {
                    let Some(axis) = self.axis(key, &origin, &value, mistakes) else { continue };
                    layer.axes.push(axis);
                }
            }
            "case" => {
                let tables = self.tables(value, "case", mistakes);
                let cases = tables.into_iter().map(|(table, origin)| self.case(table, origin, mistakes)).collect();
                layer.cases = Some(cases);
            }
            "exclude" => {
                let tables = self.tables(value, "exclude", mistakes);
                let excludes = tables.into_iter().map(|(table, origin)| self.exclude(table, origin, mistakes)).collect();
                layer.excludes = Some(excludes);
            }
            _ if unbuilt::TABLES.iter().any(|(table, _)| *table == name) => {
                let feature = unbuilt::TABLES.iter().find(|(table, _)| *table == name).map_or("", |(_, feature)| feature);
                mistakes.add(&origin, format!("`[{name}]` is not built yet: {feature}"));
            }
            _ if schema::is_table(name) => {
                if let Some(table) = self.table(value, name, mistakes) {
                    self.scalars(name, table, layer, mistakes);
                }
            }
            _ => {
                let places = schema::by_name(name, |_| true);
                if let Some(key) = places.first() {
                    mistakes.add(&origin, format!("`{name}` stands outside its table")).push(format!("it belongs in [{}]", KEYS[*key].table()));
                } else {
                    let kind = if value.get_ref().is_table() || value.get_ref().is_array() { "table" } else { "key" };
                    let help = mistakes.add(&origin, format!("unknown {kind} `{name}`"));
                    if let Some(near) = nearest(name, schema::top_tables()) {
                        help.push(format!("did you mean `{near}`?"));
                    }
                    help.push(format!("tables: {}", list(schema::top_tables())));
                }
            }
        }
    }

    /// The keys of an ordinary table such as `[train]`.
    fn scalars(&self, path: &str, table: &DeTable<'_>, layer: &mut Layer, mistakes: &mut Mistakes<'_>) {
        for (name, value) in table {
            let full = format!("{path}.{}", name.get_ref());
            self.scalar(&full, self.origin(name.span()), value, layer, mistakes);
        }
    }

    fn scalar(&self, path: &str, origin: Origin, value: &Spanned<DeValue<'_>>, layer: &mut Layer, mistakes: &mut Mistakes<'_>) {
        if let Some(key) = schema::by_path(path) {
            if path.starts_with("search.") {
                layer.search = Some(origin.clone());
            }
            let list_of_values = matches!(value.get_ref(), DeValue::Array(_)) && !KEYS[key].kind.is_list();
            if list_of_values && self.argument.is_some() && KEYS[key].varies() {
                layer.lists.extend(self.axis(key, &origin, value, mistakes));
            } else if list_of_values {
                let help = mistakes.add(&self.origin(value.span()), format!("`{path}` takes one value, this is a list"));
                if KEYS[key].varies() {
                    help.push(format!("a list of values makes rows of the tables: put `{}` in [grid]", KEYS[key].name()));
                }
            } else if let Some(value) = self.value(key, value, mistakes) {
                if let Some(earlier) = layer.scalars.get(&key) {
                    let elsewhere = mistakes.mention(&earlier.origin);
                    mistakes.add(&origin, format!("`{path}` is given twice, also on {elsewhere}"));
                }
                layer.scalars.insert(key, Located { value, origin });
            }
        } else if schema::is_table(path) {
            if let Some(table) = self.table(value, path, mistakes) {
                if path == "search.block_size" {
                    layer.search = Some(origin);
                }
                self.scalars(path, table, layer, mistakes);
            }
        } else {
            unknown(path, &origin, mistakes);
        }
    }

    /// One `--set`, its path complete.
    fn set(&self, path: &str, value: &Spanned<DeValue<'_>>, layer: &mut Layer, mistakes: &mut Mistakes<'_>) {
        let origin = self.origin(value.span());
        let (top, rest) = path.split_once('.').unwrap_or((path, ""));
        match top {
            "case" | "exclude" | "profile" => {
                mistakes
                    .add(&origin, format!("`{top}` cannot be set from the command line"))
                    .push("set a key, or write it in the sweep file".to_owned());
            }
            "grid" if !rest.is_empty() => {
                let point = PointReader { reader: self, place: "[grid]", entries: Vec::new() };
                match point.find("", rest) {
                    Found::Key(key) => layer.axes.extend(self.axis(key, &origin, value, mistakes)),
                    _ => point.unknown(rest, &origin, mistakes),
                }
            }
            _ if unbuilt::TABLES.iter().any(|(table, _)| *table == top) => {
                let feature = unbuilt::TABLES.iter().find(|(table, _)| *table == top).map_or("", |(_, feature)| feature);
                mistakes.add(&origin, format!("`[{top}]` is not built yet: {feature}"));
            }
            _ if rest.is_empty() => {
                let name = Spanned::new(0..0, std::borrow::Cow::Borrowed(top));
                self.top_entry(&name, value, layer, mistakes);
            }
            _ => {
                // The part of a path that goes on below a key, as in data.dataset.train, is the table that the key takes.
                let parent = KEYS.iter().find(|key| path.strip_prefix(key.path).is_some_and(|below| below.starts_with('.')));
                match parent {
                    Some(key) => {
                        let below = path[key.path.len() + 1..].split('.').collect::<Vec<_>>();
                        let nested = below.into_iter().rev().fold(value.clone(), |value, name| {
                            let mut table = DeTable::new();
                            table.insert(Spanned::new(0..0, name.to_owned().into()), value);
                            Spanned::new(0..0, DeValue::Table(table))
                        });
                        self.scalar(key.path, origin, &nested, layer, mistakes);
                    }
                    None => self.scalar(path, origin, value, layer, mistakes),
                }
            }
        }
    }

    fn case(&self, table: &DeTable<'_>, origin: Origin, mistakes: &mut Mistakes<'_>) -> Case {
        let mut point = PointReader { reader: self, place: "[[case]]", entries: Vec::new() };
        let mut label = None;
        for (name, value) in table {
            if name.get_ref() == "label" {
                match Kind::Text.read(value) {
                    Ok(text) => label = Some((text.text(), self.origin(value.span()))),
                    Err(refused) => {
                        *mistakes.add(&self.origin(refused.span), format!("label: {}", refused.message)) = refused.help;
                    }
                }
            } else {
                point.entry("", name, value, mistakes);
            }
        }
        let mut case = Case { label, origin, fixed: Vec::new(), axes: Vec::new() };
        for (key, origin, value) in point.entries {
            if matches!(value.get_ref(), DeValue::Array(_)) {
                case.axes.extend(self.axis(key, &origin, &value, mistakes));
            } else if let Some(value) = self.value(key, &value, mistakes) {
                case.fixed.push((key, Located { value, origin }));
            }
        }
        for (one, other) in EXCLUSIVE {
            let place = |path| {
                let key = schema::key(path);
                let fixed = case.fixed.iter().find(|(fixed, _)| *fixed == key).map(|(_, located)| &located.origin);
                fixed.or_else(|| case.axes.iter().find(|axis| axis.key == key).map(|axis| &axis.origin))
            };
            if let (Some(_), Some(second)) = (place(one), place(other)) {
                mistakes.add(second, format!("`{other}` beside `{one}` in one case")).push("keep one of the two".to_owned());
            }
        }
        if case.fixed.is_empty() && case.axes.is_empty() && case.label.is_none() && mistakes.is_empty() {
            mistakes.add(&case.origin, "an empty case").push("give it a label, or keys that set it apart".to_owned());
        }
        case
    }

    fn exclude(&self, table: &DeTable<'_>, origin: Origin, mistakes: &mut Mistakes<'_>) -> Exclude {
        let mut point = PointReader { reader: self, place: "[[exclude]]", entries: Vec::new() };
        point.walk("", table, mistakes);
        if table.is_empty() {
            mistakes.add(&origin, "an empty exclude would drop every point").push("name the keys and values of the points to drop".to_owned());
        }
        let mut exclude = Exclude { origin, entries: Vec::new() };
        for (key, origin, value) in point.entries {
            if matches!(value.get_ref(), DeValue::Array(_)) {
                mistakes
                    .add(&self.origin(value.span()), format!("`{}` takes one value here, this is a list", KEYS[key].name()))
                    .push("write one [[exclude]] for each value".to_owned());
            } else if let Some(value) = self.value(key, &value, mistakes) {
                exclude.entries.push((key, Located { value, origin }));
            }
        }
        exclude
    }

    /// A list of values of one key: each typed, equal ones once.
    fn axis(&self, key: KeyIndex, origin: &Origin, value: &Spanned<DeValue<'_>>, mistakes: &mut Mistakes<'_>) -> Option<Axis> {
        let DeValue::Array(elements) = value.get_ref() else {
            mistakes
                .add(&self.origin(value.span()), format!("`{}` takes a list of values here", KEYS[key].name()))
                .push(format!("one value that holds for every row belongs in [{}]", KEYS[key].table()));
            return None;
        };
        if elements.is_empty() {
            mistakes
                .add(&self.origin(value.span()), format!("`{}` has no values", KEYS[key].name()))
                .push("an axis without values makes no point".to_owned());
            return None;
        }
        let mut values: Vec<Value> = Vec::new();
        let mut complete = true;
        for element in elements.iter() {
            match self.value(key, element, mistakes) {
                Some(value) if values.contains(&value) => {}
                Some(value) => values.push(value),
                None => complete = false,
            }
        }
        complete.then(|| Axis { key, values, origin: origin.clone() })
    }

    fn value(&self, key: KeyIndex, value: &Spanned<DeValue<'_>>, mistakes: &mut Mistakes<'_>) -> Option<Value> {
        let key = &KEYS[key];
        match key.kind.read(value) {
            Ok(typed) => match unbuilt::refusal(key, &typed) {
                Some(reason) => {
                    mistakes.add(&self.origin(value.span()), reason);
                    None
                }
                None => Some(typed),
            },
            Err(refused) => {
                let help = mistakes.add(&self.origin(refused.span), format!("{}: {}", key.path, refused.message));
                help.extend(refused.help);
                help.push(format!("`{}`: {}", key.name(), key.doc));
                None
            }
        }
    }

    fn table<'a, 'i>(&self, value: &'a Spanned<DeValue<'i>>, name: &str, mistakes: &mut Mistakes<'_>) -> Option<&'a DeTable<'i>> {
        match value.get_ref() {
            DeValue::Table(table) => Some(table),
            other => {
                mistakes.add(&self.origin(value.span()), format!("`{name}` is a table, this is {}", type_of(other))).push(format!("write [{name}]"));
                None
            }
        }
    }

    fn tables<'a, 'i>(&self, value: &'a Spanned<DeValue<'i>>, name: &str, mistakes: &mut Mistakes<'_>) -> Vec<(&'a DeTable<'i>, Origin)> {
        let DeValue::Array(elements) = value.get_ref() else {
            mistakes.add(&self.origin(value.span()), format!("`{name}` is a list of tables")).push(format!("write [[{name}]]"));
            return Vec::new();
        };
        let mut tables = Vec::new();
        for element in elements.iter() {
            match element.get_ref() {
                DeValue::Table(table) => tables.push((table, self.origin(element.span()))),
                _ => mistakes.add(&self.origin(element.span()), format!("`{name}` holds tables only")).push(format!("write [[{name}]]")),
            }
        }
        tables
    }
}

/// Reads the keys that set points apart, which may be written bare.
struct PointReader<'a, 'i> {
    reader: &'a Reader,
    place: &'static str,
    entries: Vec<(KeyIndex, Origin, Spanned<DeValue<'i>>)>,
}

impl<'i> PointReader<'_, 'i> {
    fn walk(&mut self, prefix: &str, table: &DeTable<'i>, mistakes: &mut Mistakes<'_>) {
        for (name, value) in table {
            self.entry(prefix, name, value, mistakes);
        }
    }

    fn entry(&mut self, prefix: &str, name: &Spanned<std::borrow::Cow<'_, str>>, value: &Spanned<DeValue<'i>>, mistakes: &mut Mistakes<'_>) {
        let origin = self.reader.origin(name.span());
        match self.find(prefix, name.get_ref()) {
            Found::Key(key) if !KEYS[key].varies() => {
                mistakes
                    .add(&origin, format!("`{}` is the same for every row of a sweep", KEYS[key].path))
                    .push(format!("in {} stand keys of [model], [train] and [fsdp], and device.world_size", self.place));
            }
            Found::Key(key) => {
                if let Some((_, earlier, _)) = self.entries.iter().find(|(other, ..)| *other == key) {
                    let elsewhere = mistakes.mention(earlier);
                    mistakes.add(&origin, format!("`{}` is given twice, also on {elsewhere}", KEYS[key].path));
                } else {
                    self.entries.push((key, origin, value.clone()));
                }
            }
            Found::Table(path) => match value.get_ref() {
                DeValue::Table(table) => self.walk(&path, table, mistakes),
                _ => self.unknown(name.get_ref(), &origin, mistakes),
            },
            Found::Nothing if prefix.is_empty() => self.unknown(name.get_ref(), &origin, mistakes),
            Found::Nothing => unknown(&format!("{prefix}.{}", name.get_ref()), &origin, mistakes),
        }
    }

    fn find(&self, prefix: &str, name: &str) -> Found {
        let full = if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
        if let Some(key) = schema::by_path(&full) {
            return Found::Key(key);
        }
        if schema::is_table(&full) {
            return Found::Table(full);
        }
        if !prefix.is_empty() {
            return Found::Nothing;
        }
        if name == "config" || name.starts_with("config.") {
            return self.find("model", name);
        }
        match schema::by_name(name, Key::varies).as_slice() {
            [key] => Found::Key(*key),
            _ => match schema::by_name(name, |_| true).as_slice() {
                [key, ..] => Found::Key(*key),
                [] => Found::Nothing,
            },
        }
    }

    fn unknown(&self, name: &str, origin: &Origin, mistakes: &mut Mistakes<'_>) {
        if unbuilt::TABLES.iter().any(|(table, _)| name == *table || name.split('.').next() == Some(table)) {
            mistakes.add(origin, format!("`{name}` is not built yet"));
            return;
        }
        let varying = || KEYS.iter().filter(|key| key.varies());
        let near = nearest(name, varying().map(Key::name).chain(varying().map(|key| key.path)));
        let help = mistakes.add(origin, format!("unknown key `{name}` in {}", self.place));
        match near {
            Some(near) => help.push(format!("did you mean `{near}`?")),
            None => help.push("allowed are keys of [model], [train] and [fsdp], and device.world_size".to_owned()),
        }
    }
}

fn unknown(path: &str, origin: &Origin, mistakes: &mut Mistakes<'_>) {
    let (table, name) = path.rsplit_once('.').unwrap_or(("", path));
    let names = schema::names_in(table);
    let elsewhere = schema::by_name(name, |_| true);
    let help = mistakes.add(origin, if table.is_empty() { format!("unknown key `{name}`") } else { format!("unknown key `{name}` in [{table}]") });
    if let Some(near) = nearest(name, names.iter().copied()) {
        help.push(format!("did you mean `{near}`?"));
    } else if let Some(key) = elsewhere.first() {
        help.push(format!("it belongs in [{}]", KEYS[*key].table()));
    } else if let Some(key) = KEYS.iter().find(|key| nearest(name, [key.name()]).is_some()) {
        help.push(format!("did you mean `{}` of [{}]?", key.name(), key.table()));
    }
    help.push(if names.is_empty() { format!("tables: {}", list(schema::top_tables())) } else { format!("allowed: {}", list(names)) });
}
