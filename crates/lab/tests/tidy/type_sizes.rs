//! How large a type may be: a type with more fields or methods than the bounds says in its comment
//! why the larger size is right, in a sentence with the word "fields" or "methods".

use std::collections::BTreeMap;

use super::{Source, assert_none, function_name, sources, type_name};

const FIELDS_MAX: usize = 15;
const METHODS_MAX: usize = 40;

#[test]
fn large_types_say_why() {
    let mut wrong = Vec::new();
    for ((name, type_name), size) in sizes(&sources("crates")) {
        for (count, bound, what) in
            [(size.fields, FIELDS_MAX, "fields"), (size.methods, METHODS_MAX, "methods")]
        {
            if count > bound && !size.comment.contains(what) {
                let of = format!("{name}: {type_name} has {count} {what}");
                wrong.push(format!("{of}, more than {bound}, and its comment does not say why"));
            }
        }
    }
    assert_none(&wrong);
}

#[test]
fn fields_and_methods_are_counted() {
    let one = "/// With fields.\n#[derive(Debug)]\npub struct One<'a> {\n    /// No field\n    \
               pub a: u8,\n    pub(super) b: [u8; 2],\n    r#type: u8,\n}\n\nstruct Two(u8);\n\n";
    let methods = "impl<'a> One<'a> {\n    fn a() {\n        fn inner() {}\n    }\n}\n\n\
                   unsafe impl<T: Into<u8>> From<T> for One<'_> {\n    fn from(t: T) {\n    }\n}\n\
                   impl Two {\n    const fn b() {}\n}\n\n";
    let tests = "mod tests {\n    impl Two {\n        fn c() {}\n    }\n}\n";
    let text = [one, methods, tests].concat();
    let path = "crates/x/src/a.rs".to_owned();
    let found: Vec<_> = sizes(&[Source { path, text }]).into_iter().collect();
    let size =
        |fields, methods, comment: &str| TypeSize { fields, methods, comment: comment.into() };
    let key = |name: &str| ("x".to_owned(), name.to_owned());
    let expected = [
        (key("One"), size(3, 2, "/// With fields.\n#[derive(Debug)]\n")),
        (key("Two"), size(0, 1, "")),
    ];
    assert_eq!(found, expected);
}

#[derive(Debug, Default, PartialEq, Eq)]
struct TypeSize {
    fields: usize,
    methods: usize,
    /// Comment and attributes in front of the type.
    comment: String,
}

/// The sizes of all types, by crate and name, without those of tests. Methods of all `impl` blocks
/// of a type count together.
fn sizes(sources: &[Source]) -> BTreeMap<(String, String), TypeSize> {
    let mut found = BTreeMap::<_, TypeSize>::new();
    for source in sources {
        let Some((name, inside)) = source.path.split_once("/src/") else { continue };
        if inside.split('/').any(|part| part == "tests" || part == "tests.rs") {
            continue;
        }
        let name = name.trim_start_matches("crates/");
        let (mut comment, mut block) = (String::new(), None);
        for line in source.text.lines().take_while(|line| *line != "mod tests {") {
            if line.starts_with("//") || line.starts_with("#[") {
                comment += &format!("{line}\n");
                continue;
            }
            let declared = (!line.starts_with(' ')).then(|| type_name(line)).flatten();
            if let Some(type_name) = declared.or_else(|| implemented(line)) {
                let size = found.entry((name.to_owned(), type_name.to_owned())).or_default();
                size.comment += if declared.is_some() { &comment } else { "" };
                block = line.ends_with('{').then_some((type_name.to_owned(), declared.is_some()));
            } else if line.starts_with('}') {
                block = None;
            } else if let Some((type_name, is_declaration)) = &block
                && let Some(member) = line.strip_prefix("    ").filter(|it| !it.starts_with(' '))
            {
                let size = found.get_mut(&(name.to_owned(), type_name.clone())).unwrap();
                size.fields += usize::from(*is_declaration && is_field(member));
                size.methods += usize::from(!is_declaration && function_name(member).is_some());
            }
            comment.clear();
        }
    }
    found
}

/// The type of an `impl` block that begins in this line.
fn implemented(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("unsafe ").unwrap_or(line).strip_prefix("impl")?;
    let is_generic = rest.starts_with('<');
    let mut depth = 0;
    let end = rest.find(|letter: char| {
        depth += i32::from(letter == '<') - i32::from(letter == '>');
        depth == 0
    })?;
    let rest = if is_generic { &rest[end + 1..] } else { rest };
    let path = rest.split(" for ").last()?.trim_start().split(['<', ' ', '{']).next()?;
    path.split("::").last()
}

/// Whether this line of a declaration is a field with a name.
fn is_field(line: &str) -> bool {
    let is_visible = line.starts_with("pub");
    let rest = if is_visible { line.split_once(' ').map_or("", |(_, rest)| rest) } else { line };
    let name = rest.trim_start_matches("r#").split_once(": ").map_or("", |(name, _)| name);
    !name.is_empty() && name.chars().all(|letter| letter.is_alphanumeric() || letter == '_')
}
