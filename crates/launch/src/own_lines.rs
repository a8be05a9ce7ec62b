//! Lines of the launcher itself on standard error, between the output of the ranks.
//!
//! Every line begins with the name of the program, also the further lines of a message, which are
//! indented. So `grep -v '^landbridge'` leaves what the ranks have printed, and a test that
//! compares the output of two runs does not compare messages about the network.

/// Beginning of every line of the launcher itself.
const LINE_START: &str = "landbridge: ";

/// The lines of a message of the launcher.
pub fn own_lines(text: &str) -> String {
    format!("{LINE_START}{}\n", text.replace('\n', &format!("\n{LINE_START}")))
}

/// The last message among `output` of a job, with all its lines; the last line if there is none.
pub fn last_message(output: &str) -> Option<String> {
    let is_begin =
        |line: &&str| line.strip_prefix(LINE_START).is_some_and(|text| !text.starts_with(' '));
    let lines: Vec<&str> = output.lines().collect();
    let begin = lines.iter().rposition(is_begin).or(lines.len().checked_sub(1))?;
    let texts = lines[begin..].iter().map(|line| line.strip_prefix(LINE_START).unwrap_or(line));
    Some(texts.collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_message_has_all_its_lines_and_each_begins_with_the_name() {
        let output = format!("landbridge: one\nx\n{}", own_lines("two\n  more"));
        assert!(output.ends_with("\nlandbridge: two\nlandbridge:   more\n"), "{output}");
        assert_eq!(last_message(&output).as_deref(), Some("two\n  more"));
        assert_eq!(last_message("a\nb").as_deref(), Some("b"));
        assert_eq!(last_message(""), None);
    }
}
