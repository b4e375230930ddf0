//! The modules of a model as PyTorch would print them: paths, classes, parameters in registration order, ties.

/// One module.
#[derive(Clone, Debug, PartialEq)]
pub struct Module {
    /// Its name within its parent: `h`, `0`, `attn`.
    pub name: String,
    /// PyTorch's class name: `GPT2Block`, `Conv1D`, `ModuleList`.
    pub class: &'static str,
    /// Its own parameters, name and shape, in registration order.
    pub parameters: Vec<(&'static str, Vec<usize>)>,
    /// Its children, in registration order.
    pub children: Vec<Module>,
}

impl Module {
    /// A module that has children only.
    pub fn container(name: impl Into<String>, class: &'static str, children: Vec<Module>) -> Self {
        Self { name: name.into(), class, parameters: Vec::new(), children }
    }

    /// A module that has parameters only.
    pub fn leaf(name: impl Into<String>, class: &'static str, parameters: Vec<(&'static str, Vec<usize>)>) -> Self {
        Self { name: name.into(), class, parameters, children: Vec::new() }
    }
}

/// One parameter of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterInfo {
    /// Hugging Face's name: `transformer.h.0.attn.c_attn.weight`.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// PyTorch's class of the module that owns it.
    pub module_class: &'static str,
}

impl ParameterInfo {
    /// Elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether weight decay acts on it by default: not on biases and not on the weights of norms.
    pub fn decays_by_default(&self) -> bool {
        !self.name.ends_with("bias") && !self.module_class.ends_with("Norm")
    }
}

/// All modules of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModuleTree {
    /// The outermost module; its name is empty.
    pub root: Module,
    /// Tied parameters, second name first: `("lm_head.weight", "transformer.wte.weight")`. The second name is not listed among [`Self::parameters`].
    pub ties: Vec<(String, String)>,
}

impl ModuleTree {
    /// Every parameter once, in registration order; of tied ones the owner.
    pub fn parameters(&self) -> Vec<ParameterInfo> {
        let mut all = Vec::new();
        self.visit(&mut |path, module| {
            for (name, shape) in &module.parameters {
                let name = join(path, name);
                if self.owner(&name) == name {
                    all.push(ParameterInfo { name, shape: shape.clone(), module_class: module.class });
                }
            }
        });
        all
    }

    /// Elements of all parameters; tied ones count once.
    pub fn numel(&self) -> usize {
        self.parameters().iter().map(ParameterInfo::numel).sum()
    }

    /// The name under which a parameter is kept: its owner's if it is tied, its own otherwise.
    pub fn owner<'a>(&'a self, name: &'a str) -> &'a str {
        self.ties.iter().find(|(tied, _)| tied == name).map_or(name, |(_, owner)| owner)
    }

    /// Every class there is, without repetition, in order of first appearance: the candidates of a wrap policy.
    pub fn classes(&self) -> Vec<&'static str> {
        let mut classes = Vec::new();
        self.visit(&mut |_, module| {
            if !classes.contains(&module.class) {
                classes.push(module.class);
            }
        });
        classes
    }

    /// Calls `with` for every module and its path, parents before children; the root's path is empty.
    pub fn visit<'a>(&'a self, with: &mut dyn FnMut(&str, &'a Module)) {
        visit("", &self.root, with);
    }
}

fn visit<'a>(path: &str, module: &'a Module, with: &mut dyn FnMut(&str, &'a Module)) {
    with(path, module);
    for child in &module.children {
        visit(&join(path, &child.name), child, with);
    }
}

/// `path.name`, or `name` alone at the root.
pub(crate) fn join(path: &str, name: &str) -> String {
    if path.is_empty() { name.to_owned() } else { format!("{path}.{name}") }
}
