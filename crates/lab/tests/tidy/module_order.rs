//! The order of modules: a table in the head of a folder (`mod.rs`, `lib.rs` or `main.rs`) lists
//! the modules of the folder, and each module uses only those before it.
//!
//! A module uses another one if its code names a path into the other one, in an import or anywhere
//! else, or a name that the head of the folder imports from the other one. Tests are left out, and
//! a head may name every module below it.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::{MAY_USE, Source, assert_none, sources};

/// Folders whose modules use each other in circles: C declarations that point to each other.
const CIRCULAR: [&str; 1] = ["crates/provider/src/abi"];

#[test]
fn modules_in_order_use_only_those_before_them() {
    let (mut wrong, mut tables) = (Vec::new(), 0);
    for (tree, module, folder) in folders() {
        let (order, children) = (tree.order(&module), tree.children(&module));
        if order.is_empty() && (children.len() == 1 || is_circular(&folder)) {
            continue;
        }
        tables += 1;
        let place = |name: &String| order.iter().position(|listed| listed == name);
        for name in children.iter().filter(|name| place(name).is_none()) {
            wrong.push(format!("{folder}: {name} is not in the table"));
        }
        for (user, used) in tree.uses_inside(&module) {
            if place(&used) > place(&user) {
                wrong.push(format!("{folder}: {user} uses {used}"));
            }
        }
    }
    assert!(tables > 30, "only {tables} tables of modules were found");
    assert_none(&wrong);
}

#[test]
fn no_modules_use_each_other_in_circles() {
    let mut wrong = Vec::new();
    for (tree, module, folder) in folders() {
        let circular = tree.circular(&module);
        if circular.is_empty() == is_circular(&folder) {
            wrong.push(format!("{folder}: {circular:?}"));
        }
    }
    assert_none(&wrong);
}

fn is_circular(folder: &str) -> bool {
    CIRCULAR.contains(&folder)
}

/// Every module that has modules below it, with its crate and its path in the repository.
fn folders() -> Vec<(Rc<ModuleTree>, ModulePath, String)> {
    let mut found = Vec::new();
    for root in MAY_USE.map(|(name, _)| format!("crates/{name}/src")) {
        let tree = Rc::new(ModuleTree::of(&sources(&root)));
        for module in tree.folders() {
            let path = [std::slice::from_ref(&root), &module[..]].concat().join("/");
            found.push((Rc::clone(&tree), module, path));
        }
    }
    found
}

#[test]
fn the_reader_of_paths_sees_every_one() {
    let text = "pub use self::one::{two::{self, B}, A};\n\
                use crate::{\n    id::Address,\n    limit,\n};\n\
                // use crate::comment;\n\
                let f = |x: crate::tag::Any| super::super::slab(x::Y);\n\
                #[cfg(test)]\nmod tests {\n    use crate::other;\n}\n";
    let found: Vec<_> = named_paths(&code_of(text)).iter().map(|path| path.join("::")).collect();
    let expected = [
        "self::one::two::self",
        "self::one::two::B",
        "self::one::A",
        "crate::id::Address",
        "crate::limit",
        "crate::tag::Any",
        "super::super::slab",
    ];
    assert_eq!(found, expected);
}

#[test]
fn the_reader_of_modules_finds_what_a_path_names() {
    let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
    let tree = ModuleTree::of(&[
        source("crates/x/src/lib.rs", "//! | `b` | x |\n//! | `a` | x |\nmod a;\nmod b;\n"),
        source("crates/x/src/a/mod.rs", "mod c;\nmod d;\nuse d::D;\n#[cfg(test)]\nmod e;\n"),
        source("crates/x/src/a/c.rs", "use super::D;\nuse crate::b::B;\n"),
        source("crates/x/src/a/d.rs", "fn d() { super::super::b::f() }\n"),
        source("crates/x/src/a/e.rs", "use super::c;\n"),
        source("crates/x/src/b.rs", ""),
    ]);
    let uses = |path| tree.uses_inside(&module_of(path)).into_iter().collect::<Vec<_>>();
    let pair = |user: &str, used: &str| (user.to_owned(), used.to_owned());
    assert_eq!(uses("crates/x/src/lib.rs"), [pair("a", "b")]);
    assert_eq!(uses("crates/x/src/a"), [pair("c", "d")]);
    assert_eq!(tree.order(&Vec::new()), ["b", "a"]);
    assert!(tree.circular(&Vec::new()).is_empty());
}

/// Names from the root of a crate to a module.
type ModulePath = Vec<String>;

/// All modules of a crate without tests. A `lib.rs` and a `main.rs` are one module.
struct ModuleTree(BTreeMap<ModulePath, Module>);

#[derive(Default)]
struct Module {
    text: String,
    /// Every path that the code names, as the code writes it.
    named: Vec<Vec<String>>,
}

impl ModuleTree {
    fn of(sources: &[Source]) -> ModuleTree {
        let mut tree = BTreeMap::<ModulePath, Module>::new();
        for source in sources {
            let module = tree.entry(module_of(&source.path)).or_default();
            module.text += &source.text;
            module.named.extend(named_paths(&code_of(&source.text)));
        }
        let is_test = |path: &ModulePath| {
            (0..path.len()).any(|at| {
                let declaration = format!("#[cfg(test)]\nmod {};", path[at]);
                path[at] == "tests"
                    || tree.get(&path[..at]).is_some_and(|head| head.text.contains(&declaration))
            })
        };
        let tests: Vec<ModulePath> = tree.keys().filter(|path| is_test(path)).cloned().collect();
        tree.retain(|path, _| !tests.contains(path));
        ModuleTree(tree)
    }

    /// Modules that have modules below them.
    fn folders(&self) -> BTreeSet<ModulePath> {
        self.0.keys().filter_map(|path| Some(path.split_last()?.1.to_vec())).collect()
    }

    fn children(&self, folder: &ModulePath) -> BTreeSet<String> {
        let below = self.0.keys().filter_map(|path| path.split_last());
        below.filter(|(_, parent)| parent == folder).map(|(name, _)| name.clone()).collect()
    }

    /// The modules of the table in the head of a folder.
    fn order(&self, folder: &ModulePath) -> Vec<String> {
        let children = self.children(folder);
        let rows = self.0[folder].text.lines().filter_map(|line| line.strip_prefix("//! | "));
        let cells = rows.filter_map(|row| row.split(" |").next());
        let names = cells.flat_map(|cell| cell.split(", "));
        let names = names.map(|name| name.trim_matches(['[', ']', '`']).to_owned());
        names.filter(|name| children.contains(name)).collect()
    }

    /// Which child of a folder uses which other one.
    fn uses_inside(&self, folder: &ModulePath) -> BTreeSet<(String, String)> {
        let child_of = |path: &ModulePath| {
            path.get(folder.len()).filter(|_| path.starts_with(folder)).cloned()
        };
        let mut found = BTreeSet::new();
        for (path, module) in &self.0 {
            let Some(user) = child_of(path) else { continue };
            let targets = module.named.iter().filter_map(|named| self.resolve(path, named, 0));
            let used = targets.filter_map(|target| child_of(&target));
            found.extend(used.filter(|used| *used != user).map(|used| (user.clone(), used)));
        }
        found
    }

    /// Children of a folder that use each other in circles, and those that use them.
    fn circular(&self, folder: &ModulePath) -> BTreeSet<String> {
        let (mut left, uses) = (self.children(folder), self.uses_inside(folder));
        loop {
            let uses_another =
                |name: &String| uses.iter().any(|(user, used)| user == name && left.contains(used));
            let next: BTreeSet<String> =
                left.iter().filter(|name| uses_another(name)).cloned().collect();
            if next == left {
                return left;
            }
            left = next;
        }
    }

    /// The module that `named` names in the code of module `from`. `depth`: number of imports that
    /// were followed so far.
    fn resolve(&self, from: &ModulePath, named: &[String], depth: usize) -> Option<ModulePath> {
        let mut at = match named.first()?.as_str() {
            "crate" => Vec::new(),
            "self" => from.clone(),
            "super" => from.split_last()?.1.to_vec(),
            name => Some([from, &[name.to_owned()][..]].concat())
                .filter(|path| self.0.contains_key(path))?,
        };
        for name in &named[1..] {
            let below = [&at[..], std::slice::from_ref(name)].concat();
            match name.as_str() {
                "self" => (),
                "super" => drop(at.pop()),
                _ if self.0.contains_key(&below) => at = below,
                _ => {
                    let imports = &self.0.get(&at)?.named;
                    let import = imports.iter().find(|path| path.last() == Some(name));
                    let origin = import.filter(|_| depth < 4 && at != *from);
                    let origin = origin.and_then(|path| self.resolve(&at, path, depth + 1));
                    return Some(origin.unwrap_or(at));
                }
            }
        }
        Some(at)
    }
}

/// The module that a file or a folder holds.
fn module_of(path: &str) -> ModulePath {
    let inside = path.split_once("/src").map_or("", |(_, inside)| inside);
    let names = inside.trim_end_matches(".rs").split('/').filter(|name| !name.is_empty());
    let mut names: ModulePath = names.map(str::to_owned).collect();
    names.pop_if(|name| matches!(name.as_str(), "mod" | "lib" | "main"));
    names
}

/// A file without comments and tests.
fn code_of(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.map(|line| format!("{line}\n")).collect()
}

/// Every path that an import names, and every other path that begins with `crate`, `super` or
/// `self`.
fn named_paths(code: &str) -> Vec<Vec<String>> {
    let (mut found, mut import) = (Vec::new(), String::new());
    for line in code.lines().map(str::trim) {
        match import_tree(line) {
            Some(tree) if import.is_empty() => import += tree,
            None if import.is_empty() => found.extend(inline_paths(line)),
            _ => import += line,
        }
        if import.ends_with(';') {
            expand(&[], import.trim_end_matches(';'), &mut found);
            import.clear();
        }
    }
    found
}

/// What a line imports, if it begins an import.
fn import_tree(line: &str) -> Option<&str> {
    let visible = |line: &'_ str| line.starts_with("pub ") || line.starts_with("pub(");
    match line.strip_prefix("use ") {
        Some(tree) => Some(tree),
        None if visible(line) => line.split_once(" use ").map(|(_, tree)| tree),
        None => None,
    }
}

/// Adds the paths of an import such as `a::{b, c::{self, D}}`.
fn expand(before: &[String], tree: &str, found: &mut Vec<Vec<String>>) {
    let (path, list) = tree.split_once('{').map_or((tree, None), |(path, list)| (path, Some(list)));
    let path = path.split(" as ").next().unwrap_or_default();
    let path = [before, &segments(path)].concat();
    let Some(list) = list else { return found.push(path) };
    let (mut depth, mut start) = (0, 0);
    let list = list.trim_end().strip_suffix('}').unwrap_or(list).to_owned() + ",";
    for (at, letter) in list.char_indices() {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        if letter == ',' && depth == 0 {
            let part = list[start..at].trim();
            if !part.is_empty() {
                expand(&path, part, found);
            }
            start = at + 1;
        }
    }
}

fn inline_paths(line: &str) -> impl Iterator<Item = Vec<String>> {
    let is_part = |letter: char| letter.is_alphanumeric() || letter == '_' || letter == ':';
    let words = line.split(move |letter: char| !is_part(letter));
    let paths = words.map(segments);
    paths.filter(|path| matches!(path[..], [ref first, _, ..] if is_anchor(first)))
}

fn is_anchor(name: &str) -> bool {
    matches!(name, "crate" | "super" | "self")
}

fn segments(path: &str) -> Vec<String> {
    let names = path.split("::").map(|name| name.trim().trim_matches(':'));
    names.filter(|name| !name.is_empty()).map(str::to_owned).collect()
}
