//! Wrong sweep files: every mistake at its place, with what is allowed.

use proptest::prelude::*;

use super::*;

/// A dozen different mistakes are a dozen errors, each with its line, its column, an excerpt and what to do.
#[test]
fn a_dozen_mistakes_are_shown_at_once() {
    let text = r#"[model]
id = "gpt2-tiny"
ini = "random"

[train]
learning_rate = "2e-5"
max_steps = 10
num_train_epochs = 1
shuffle = true

[fsdp]
sharding_strategy = "FULL_SHRD"
cpu_offload = "true"

[device]
memory = "16 GB!"

[grid]
weight_decay = [0.1, "0.2"]
warmup_steps = []
seed = 3

[limts]
retries = 1
"#;
    let errors = errors_with(text, &["use_orig_prams=true"]);
    assert_eq!(errors.to_string() + "\n", include_str!("mistakes.txt"));
}

/// Case 21 and 22, one line each: what is wrong and where.
#[test]
fn each_kind_of_mistake_is_found_at_its_place() {
    let cases: &[(&str, &str)] = &[
        ("[train]\nlearning_rat = 1", "4:1: unknown key `learning_rat` in [train]"),
        ("[fsdp]\nuse_orig_params = \"true\"", "4:19: fsdp.use_orig_params: this is a string"),
        ("[fsdp]\nsharding_strategy = \"ZERO3\"", "4:21: fsdp.sharding_strategy: \"ZERO3\" is not a valid value"),
        ("[fsdp]\nsharding_strategy = true", "4:21: fsdp.sharding_strategy: this is a boolean"),
        ("[train]\nseed = -1", "4:8: train.seed: -1 is negative"),
        ("[train]\nmax_steps = 0", "4:13: train.max_steps: 0 is too small"),
        ("[train]\nmax_steps = 10.0", "4:13: train.max_steps: this is a float"),
        ("[train]\nadam_beta1 = 1.0", "4:14: train.adam_beta1: 1 is out of range"),
        ("[train]\nlearning_rate = nan", "4:17: train.learning_rate: NaN is out of range"),
        ("[train]\nlearning_rate = [1e-5, 2e-5]", "4:17: `train.learning_rate` takes one value, this is a list"),
        ("[grid]\nlearning_rate = 1e-5", "4:17: `learning_rate` takes a list of values here"),
        ("[grid]\nlearning_rate = []", "4:17: `learning_rate` has no values"),
        ("[grid]\nlearning_rate = [1e-5, \"2e-5\"]", "4:24: train.learning_rate: this is a string"),
        ("[grid]\nuse_orig_params = [true, \"true\"]", "4:26: fsdp.use_orig_params: this is a string"),
        ("[grid]\nmemory = [\"1GiB\"]", "4:1: `device.memory` is the same for every row of a sweep"),
        ("[grid]\nlerning_rate = [1]", "4:1: unknown key `lerning_rate` in [grid]"),
        ("[grid]\nseed = [1]\ntrain.seed = [2]", "5:7: `train.seed` is given twice, also on line 4"),
        ("[train]\nseed = 1\n[grid]\nseed = [2, 3]", "6:1: `train.seed` is a list here and one value on line 4"),
        ("[train]\nmax_steps = 1\nnum_train_epochs = 1", "5:1: `train.num_train_epochs` beside `train.max_steps` (line 4)"),
        ("[fsdp]\nuse_orig_params = true\nuse_original_params = true", "5:1: `fsdp.use_original_params` is given twice, also on line 4"),
        ("[device]\nmemory = \"16\"", "4:10: device.memory: \"16\" has no unit"),
        ("[device]\nmemory = \"16Gib\"", "4:10: device.memory: \"Gib\" is not a unit of size; did you mean \"16GiB\"?"),
        ("[device]\nmemory = 16", "4:10: device.memory: this is an integer"),
        ("[limits]\ngrace_period = \"10 parsecs\"", "4:16: limits.grace_period: \"10 parsecs\" is not a time"),
        ("[telemetry]\ninterval = \"1ms\"", "4:12: telemetry.interval: \"1ms\" is too short"),
        ("config = 4", "3:10: `model.config` is a table, this is an integer"),
        ("[[grid]]\nseed = 1", "3:1: `grid` is a table, this is an array"),
        ("[data]\ndataset = { train = \"a\", evl = \"b\" }", "4:26: data.dataset: unknown key `evl`"),
        ("[data]\ntokenizer = \"gpt2\"", "4:1: synthetic data are tokens already, a tokenizer has nothing to do"),
        ("[data]\ndataset = { token_blocks = \"x\" }", "4:1: token_blocks need `train.block_size`"),
        ("[[case]]\nlabel = \"a\"\n[[case]]\nlabel = \"a\"\nseed = 1", "6:9: the label \"a\" is taken by the case on line 4"),
        ("[[case]]", "3:1: an empty case"),
        ("[case]\nlabel = \"a\"", "3:1: `case` is a list of tables"),
        ("[[exclude]]", "3:1: an empty exclude would drop every point"),
        ("[[case]]\nseed = 1\n[[exclude]]\nseed = 1", "3:1: [[exclude]] (line 5) drops this whole case"),
        ("[grid]\nseed = [1, 2]\n[[exclude]]\nmax_grad_norm = 1", "4:1: [[exclude]] (line 5) drops every point of [grid]"),
        ("[sweep]\nname = \"a/b\"", "4:1: this name cannot be a folder's"),
        ("[sweep]\ncontrol = \"x\"", "4:1: no row has the label \"x\""),
        ("[trian]\nseed = 1", "3:2: unknown table `trian`"),
        ("[search.block_size]\ncandidates = [64, 0]", "4:19: search.block_size.candidates: 0 is too small"),
        ("[train]\nseed = 1 2", "4:8: not TOML"),
        ("[train]\nseed = 1\nseed = 2", "5:1: not TOML: duplicate key"),
    ];
    let mut wrong = String::new();
    for (text, expected) in cases {
        let found = match load_with(&format!("{BASE}{text}\n"), &[]) {
            Ok(_) => vec!["nothing".to_owned()],
            Err(_) => mistakes_in(&format!("{BASE}{text}\n")),
        };
        if found.len() != 1 || !found[0].starts_with(expected) {
            wrong.push_str(&format!("{text}\n  expected {expected}\n  found    {}\n", found.join("\n           ")));
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert_eq!(mistakes_in("learning_rate = 1\n"), ["1:1: `learning_rate` stands outside its table"]);
    assert_eq!(mistakes_in(""), ["file: `model.id` is missing"]);
}

/// Valid keys that are not built are refused by name, wherever they stand.
#[test]
fn what_is_not_built_is_refused_by_name() {
    let cases = [
        (
            "[fsdp]\nmixed_precision = \"fp8\"",
            "fsdp.mixed_precision: mixed_precision = \"fp8\" is not built: it needs hardware and kernels that sweep has not",
        ),
        ("[peft]\nr = 8", "`[peft]` is not built yet: training adapters instead of all parameters"),
        ("[runner]\ncommand = \"x\"", "`[runner]` is not built yet: running training programs other than sweep's own"),
        ("[profile.big.model]\nattn_implementation = \"flash\"", "`model.attn_implementation = flash` is not built yet: fused attention"),
    ];
    for (text, expected) in cases {
        let errors = errors_with(&format!("{BASE}{text}\n"), &[]);
        assert_eq!(errors.errors.iter().map(|error| error.message.as_str()).collect::<Vec<_>>(), [expected], "{text}");
    }
}

#[test]
fn mistakes_in_a_profile_that_is_not_applied_are_found_too() {
    assert_eq!(mistakes_in(&format!("{BASE}[profile.big.train]\nsed = 1\n")), ["4:1: unknown key `sed` in [train]"]);
}

#[test]
fn columns_count_characters() {
    let errors = errors_with(&format!("{BASE}[train]\n\"lé\" = 1\nseed = \"ü\" # ß\n"), &[]);
    let places: Vec<_> = errors.errors.iter().map(|error| error.place.clone()).collect();
    assert_eq!(places[1], Place::File { line: 5, column: 8, excerpt: "seed = \"ü\" # ß".to_owned(), width: 3 });
}

proptest! {
    /// However a file is damaged, what comes of it is a plan or mistakes with places inside the file.
    #[test]
    fn a_damaged_file_is_never_a_panic(cuts in prop::collection::vec((any::<prop::sample::Index>(), 0_usize..12, "[\\[\\]{}=\",.0-9a-z\n ü]{0,3}"), 1..4)) {
        let mut text = include_str!("../../../sweeps/gpt2_blocksize.toml").to_owned() + "[grid]\nseed = [1, 2]\n[[exclude]]\nseed = 1\n";
        for (place, length, inserted) in cuts {
            let floor = |mut at: usize| {
                while !text.is_char_boundary(at) {
                    at -= 1;
                }
                at
            };
            let start = floor(place.index(text.len()));
            let end = floor((start + length).min(text.len()));
            text.replace_range(start..end, &inserted);
        }
        if let Err(errors) = load_with(&text, &[]) {
            prop_assert!(!errors.errors.is_empty());
            let lines = text.split('\n').count();
            for error in &errors.errors {
                if let Place::File { line, column, width, .. } = error.place {
                    prop_assert!((1..=lines).contains(&line) && column >= 1 && width >= 1);
                }
            }
        }
    }
}

/// A switch of one version of FSDP is refused where every point it applies to has the other, and taken where some point can mean it.
#[test]
fn switches_of_the_other_version_are_refused_by_name() {
    let refused =
        |key: &str, version: u8| vec![format!("`fsdp.{key}` is a switch of FSDP{version}: it means nothing with fsdp_version = {}", 3 - version)];
    for (key, value) in [
        ("sharding_strategy", "\"SHARD_GRAD_OP\""),
        ("backward_prefetch", "\"BACKWARD_POST\""),
        ("forward_prefetch", "true"),
        ("limit_all_gathers", "false"),
        ("use_orig_params", "false"),
        ("sync_module_states", "false"),
    ] {
        let messages = |text: &str| {
            let text = format!("{BASE}{}\n", text.replace("KEY", key).replace("VALUE", value));
            let found = crate::spec::load("sweep.toml", &text, &Overlays::default(), &Surroundings::default()).err();
            found.map_or(Vec::new(), |errors| errors.errors.iter().map(|error| error.message.clone()).collect::<Vec<_>>())
        };
        assert_eq!(messages("[fsdp]\nfsdp_version = 2\nKEY = VALUE"), refused(key, 1));
        assert_eq!(messages("[fsdp]\nfsdp_version = 2\n[grid]\nKEY = [VALUE]"), refused(key, 1));
        assert_eq!(messages("[[case]]\nfsdp_version = 2\nKEY = VALUE\n[[case]]\nKEY = VALUE"), refused(key, 1));
        assert_eq!(messages("[fsdp]\nKEY = VALUE\n[[case]]\nfsdp_version = 2\n[[case]]\nlabel = \"b\"\nfsdp_version = 1"), Vec::<String>::new());
        assert_eq!(messages("[grid]\nfsdp_version = [1, 2]\nKEY = [VALUE]"), Vec::<String>::new());
    }
    let errors = errors_with(&format!("{BASE}[fsdp]\nreshard_after_forward = 2\n"), &[]);
    assert_eq!(errors.errors.iter().map(|error| error.message.clone()).collect::<Vec<_>>(), refused("reshard_after_forward", 2));
}
