//! `landbridge settings`: every row with the value in force and its source, as a table for users
//! and as JSON. Variables that the launcher sets for each process are listed separately and without
//! values, because one of them is a secret.

use std::fmt::Write;
use std::io;

use anyhow::Result;
use landbridge_proto::setting::{Reader, SETTINGS, Scope, Setting};

use super::{Settings, misspelt};
use crate::cli::SettingsArguments;
use crate::topology::topology_file;

pub fn run(arguments: &SettingsArguments) -> Result<()> {
    let topology = topology_file(arguments.topology.as_deref());
    let settings = Settings::find(&arguments.settings, &[], topology.as_deref())?;
    warn_of_misspelt();
    let text = if arguments.json { json(&settings) } else { listing(&settings) };
    Ok(io::Write::write_all(&mut io::stdout(), text.as_bytes())?)
}

/// Prints to standard error which variables resemble settings but are none.
pub fn warn_of_misspelt() {
    for (is, right) in misspelt() {
        eprintln!("landbridge: {is} is no setting and is not heeded; {right} is meant?");
    }
}

fn listing(settings: &Settings) -> String {
    let mut text = String::new();
    let lines = |it: &super::InForce| (it.row.name, shown(&it.text), it.source.to_string());
    let lines: Vec<_> = settings.rows.iter().map(lines).collect();
    let names = lines.iter().map(|line| line.0.len()).max().unwrap_or(0);
    let values = lines.iter().map(|line| line.1.chars().count()).max().unwrap_or(0);
    for ((name, value, source), it) in lines.iter().zip(&settings.rows) {
        let _ = writeln!(text, "{name:names$}  {value:values$}  {source}");
        let _ = writeln!(text, "    {} ({})", it.row.description, it.row.unit);
    }
    let file = settings.file.as_ref().map(|file| file.display().to_string());
    let _ = writeln!(text, "\nSettings file: {}", file.as_deref().unwrap_or("none"));
    text.push_str("\nBy flags of their own, or variables:\n");
    others(&mut text, Scope::Launcher);
    text.push_str("\nSet by the launcher for each process:\n");
    others(&mut text, Scope::Process);
    text
}

fn others(text: &mut String, scope: Scope) {
    for row in SETTINGS.iter().filter(|row| row.scope == scope) {
        let _ = writeln!(text, "{:22}  {} ({})", row.variable(), row.description, row.unit);
    }
}

fn shown(text: &str) -> String {
    if text.is_empty() { "none".to_string() } else { text.to_string() }
}

/// A JSON array of objects, in the order of the table.
fn json(settings: &Settings) -> String {
    let said = settings.rows.iter().map(|it| {
        let own = [("value", it.text.clone()), ("source", it.source.to_string())];
        object(it.row, &own)
    });
    let others = SETTINGS.iter().filter(|row| row.scope != Scope::Job).map(|row| object(row, &[]));
    let objects: Vec<String> = said.chain(others).collect();
    format!("[\n{}\n]\n", objects.join(",\n"))
}

fn object(row: &Setting, own: &[(&str, String)]) -> String {
    let scope = match row.scope {
        Scope::Job => "job",
        Scope::Launcher => "launcher",
        Scope::Process => "process",
    };
    let row_fields = [
        ("name", row.name.to_string()),
        ("variable", row.variable()),
        ("default", row.default.to_string()),
        ("unit", row.unit.to_string()),
        ("scope", scope.to_string()),
        ("description", row.description.to_string()),
    ];
    let fields = row_fields.iter().chain(own);
    let mut fields: Vec<String> =
        fields.map(|(name, text)| format!("{}: {}", quoted(name), quoted(text))).collect();
    let readers: Vec<String> = row.readers.iter().map(Reader::to_string).collect();
    let readers: Vec<String> = readers.iter().map(|reader| quoted(reader)).collect();
    fields.push(format!("\"readers\": [{}]", readers.join(", ")));
    format!("  {{{}}}", fields.join(", "))
}

/// A JSON string.
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for letter in text.chars() {
        match letter {
            '"' | '\\' => out.extend(['\\', letter]),
            control if control < ' ' => {
                let _ = write!(out, "\\u{:04x}", u32::from(control));
            }
            other => out.push(other),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_string_of_json_holds_anything() {
        assert_eq!(quoted("a\"b\\c\nd/é"), "\"a\\\"b\\\\c\\u000ad/é\"");
    }
}
