//! Which modules become FSDP units of their own: PyTorch's `auto_wrap_policy`.

use std::collections::HashSet;

use crate::spec::settings::{AutoWrapPolicy, FsdpSettings};
use crate::train::error::TrainError;
use crate::train::model::tree::{Module, ModuleTree, join};

/// Paths of the modules that are units, parents before children, the root (`""`) first.
///
/// # Errors
///
/// [`TrainError::Request`] if `transformer_layer_cls_to_wrap` names a class that the model lacks; `default_class` is wrapped where it names none.
pub fn unit_paths(tree: &ModuleTree, settings: &FsdpSettings, default_class: &str) -> Result<Vec<String>, TrainError> {
    let mut wrapped = HashSet::new();
    match settings.auto_wrap_policy {
        AutoWrapPolicy::NoWrap => {}
        AutoWrapPolicy::TransformerBasedWrap => {
            let class = settings.transformer_layer_cls_to_wrap.as_deref().unwrap_or(default_class);
            tree.visit(&mut |path, module| {
                if module.class == class {
                    wrapped.insert(path.to_owned());
                }
            });
            if wrapped.is_empty() {
                let candidates = tree.classes().join(", ");
                return Err(TrainError::Request(format!(
                    "fsdp.transformer_layer_cls_to_wrap = \"{class}\": the model has no module of that class; it has {candidates}"
                )));
            }
        }
        AutoWrapPolicy::SizeBasedWrap => {
            let mut policy = SizeBased { tree, min_num_params: settings.min_num_params, wrapped: HashSet::new() };
            // The root becomes a unit in any case, so its own verdict is not asked for.
            policy.wrap("", &tree.root, true);
            wrapped = policy.wrapped;
        }
    }
    wrapped.insert(String::new());
    let mut paths = Vec::new();
    tree.visit(&mut |path, _| {
        if wrapped.contains(path) {
            paths.push(path.to_owned());
        }
    });
    Ok(paths)
}

/// `size_based_auto_wrap_policy`, run by `_recursive_wrap`: children first; a module is wrapped if what its wrapped descendants have left over is large enough.
struct SizeBased<'a> {
    tree: &'a ModuleTree,
    min_num_params: u64,
    wrapped: HashSet<String>,
}

impl SizeBased<'_> {
    /// Wraps within `module` and, unless `children_only`, itself. Gives the parameters that are wrapped now.
    fn wrap(&mut self, path: &str, module: &Module, children_only: bool) -> i64 {
        let all = self.numel(path, module);
        if all < self.threshold() {
            return 0;
        }
        let mut inside = 0;
        for child in &module.children {
            inside += self.wrap(&join(path, &child.name), child, false);
        }
        if !children_only && all - inside >= self.threshold() && !matches!(module.class, "ModuleList" | "ModuleDict") {
            self.wrapped.insert(path.to_owned());
            return all;
        }
        inside
    }

    fn threshold(&self) -> i64 {
        i64::try_from(self.min_num_params).unwrap_or(i64::MAX)
    }

    /// Elements of the parameters in `module` and below. A tied parameter counts where its owner is, so that a tied head never becomes a unit with nothing in
    /// it (PyTorch makes one, or not, depending on how large a shard of the owner happens to be).
    fn numel(&self, path: &str, module: &Module) -> i64 {
        let own = |(name, shape): &(&str, Vec<usize>)| {
            let name = join(path, name);
            if self.tree.owner(&name) == name { shape.iter().product::<usize>() as i64 } else { 0 }
        };
        let children = module.children.iter().map(|child| self.numel(&join(path, &child.name), child));
        module.parameters.iter().map(own).sum::<i64>() + children.sum::<i64>()
    }
}
