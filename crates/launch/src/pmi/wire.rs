//! Lines of PMI-1: `cmd=NAME key=value key=value …\n`, and the block form of `spawn`
//! (`mcmd=spawn\n` … `endcmd\n`).
//!
//! In: bytes of one rank, to [`LineReader`]. Out: whole commands ([`Input`]). What may never
//! happen: a line takes more memory than [`LINE_BYTES_MAX`]; a longer line is an error, and the
//! agent closes the rank's socket.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// Most bytes of a rank's line. MPICH's own limit is 1024 bytes; the larger value allows for
/// libraries that are built with another limit.
pub const LINE_BYTES_MAX: usize = 64 * 1024;
/// Most bytes of an `mcmd` block, which is one command of a spawn with its arguments.
const BLOCK_BYTES_MAX: usize = 1024 * 1024;

/// Limits in the answer to `get_maxes`. `VALUE_MAX` is the value of MPICH's own launcher; clients
/// cut longer values into segments, and some clients have a fixed line buffer of 1024 bytes.
pub const KVSNAME_MAX: usize = 256;
pub const KEY_MAX: usize = 64;
pub const VALUE_MAX: usize = 1024;

/// One command of a rank: its name and its arguments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PmiCommand {
    pub name: String,
    arguments: BTreeMap<String, String>,
}

impl PmiCommand {
    /// Parses one line without its newline. `None` if the line has no `cmd=` or `mcmd=`.
    pub fn parse(line: &str) -> Option<PmiCommand> {
        let mut arguments = BTreeMap::new();
        let mut name = None;
        for word in line.split_ascii_whitespace() {
            // Words without '=' occur in the free text of an abort message, and are ignored.
            let Some((key, value)) = word.split_once('=') else { continue };
            if name.is_none() && (key == "cmd" || key == "mcmd") {
                name = Some(value.to_string());
            } else {
                arguments.entry(key.to_string()).or_insert_with(|| value.to_string());
            }
        }
        Some(PmiCommand { name: name?, arguments })
    }

    pub fn argument(&self, key: &str) -> Option<&str> {
        self.arguments.get(key).map(String::as_str)
    }
}

/// Builds a reply line.
pub struct Reply(String);

impl Reply {
    pub fn new(command: &str) -> Reply {
        Reply(format!("cmd={command}"))
    }

    pub fn with(mut self, key: &str, value: impl std::fmt::Display) -> Reply {
        // Writing to a String cannot fail.
        let _ = write!(self.0, " {key}={value}");
        self
    }

    pub fn line(mut self) -> String {
        self.0.push('\n');
        self.0
    }
}

/// Why a rank's PMI stream cannot be parsed any further.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WireError {
    LineTooLong,
    NotText,
}

/// A complete input of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// One line, without its newline.
    Line(String),
    /// The lines of an `mcmd` block, without its first and last line.
    Block(Vec<String>),
}

/// Beginning of a block that is written as one text; no line holds a newline.
const BLOCK_BEGIN: &str = "mcmd=spawn\n";

/// Writes a block as one text.
pub fn block_text(lines: &[String]) -> String {
    format!("{BLOCK_BEGIN}{}", lines.join("\n"))
}

/// The lines of a block that is written as one text; `None` if the text is no block.
pub fn block_lines(text: &str) -> Option<Vec<String>> {
    let lines = text.strip_prefix(BLOCK_BEGIN)?;
    Some(lines.split('\n').map(str::to_string).collect())
}

/// Whether the text is a block without an answer of its own, because another block of the same
/// spawn follows.
pub fn is_answered_later(text: &str) -> bool {
    let Some(lines) = block_lines(text) else { return false };
    let number = |key: &str| {
        let values = lines.iter().filter_map(|line| line.split_once('='));
        let mut values = values.filter(|(name, _)| *name == key);
        values.next().and_then(|(_, value)| value.parse::<u32>().ok())
    };
    number("spawnssofar") < number("totspawns")
}

/// Splits a rank's bytes into lines and blocks.
#[derive(Default)]
pub struct LineReader {
    pending: Vec<u8>,
    /// The lines so far of an incomplete `mcmd` block, and their bytes.
    block: Option<(Vec<String>, usize)>,
}

impl LineReader {
    /// Takes bytes; returns the lines and blocks that are complete now.
    pub fn handle_bytes(&mut self, bytes: &[u8]) -> Result<Vec<Input>, WireError> {
        self.pending.extend_from_slice(bytes);
        let mut inputs = Vec::new();
        let mut start = 0;
        while let Some(length) = self.pending[start..].iter().position(|&byte| byte == b'\n') {
            let line = std::str::from_utf8(&self.pending[start..start + length])
                .map_err(|_| WireError::NotText)?;
            start += length + 1;
            inputs.extend(fold_block(&mut self.block, line)?);
        }
        self.pending.drain(..start);
        if self.pending.len() > LINE_BYTES_MAX {
            return Err(WireError::LineTooLong);
        }
        Ok(inputs)
    }
}

fn fold_block(
    block: &mut Option<(Vec<String>, usize)>,
    line: &str,
) -> Result<Option<Input>, WireError> {
    let Some((lines, bytes)) = block else {
        if line.starts_with("mcmd=") {
            *block = Some((Vec::new(), 0));
            return Ok(None);
        }
        return Ok(Some(Input::Line(line.to_string())));
    };
    if line == "endcmd" {
        return Ok(block.take().map(|(lines, _)| Input::Block(lines)));
    }
    // An empty line takes memory too.
    *bytes += line.len() + size_of::<String>();
    if *bytes > BLOCK_BYTES_MAX {
        return Err(WireError::LineTooLong);
    }
    lines.push(line.to_string());
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_is_read() {
        let command =
            PmiCommand::parse("cmd=put kvsname=k key=-allgather-0-1 value=ab=[3]").unwrap();
        assert_eq!(command.name, "put");
        assert_eq!(command.argument("key"), Some("-allgather-0-1"));
        assert_eq!(command.argument("value"), Some("ab=[3]"));
        assert_eq!(command.argument("other"), None);
        assert_eq!(PmiCommand::parse("hello"), None);
    }

    #[test]
    fn a_block_is_one_text_and_only_the_last_of_a_spawn_is_answered() {
        let lines = |place: u32| {
            ["nprocs=2".to_string(), "totspawns=2".into(), format!("spawnssofar={place}")]
        };
        for place in [1, 2] {
            let text = block_text(&lines(place));
            assert_eq!(block_lines(&text).as_deref(), Some(&lines(place)[..]));
            assert_eq!(is_answered_later(&text), place == 1);
        }
        let line = "cmd=get key=totspawns=2 spawnssofar=1";
        assert!(block_lines(line).is_none() && !is_answered_later(line));
    }

    #[test]
    fn bytes_may_come_in_any_pieces() {
        let text = b"cmd=init pmi_version=1\nmcmd=spawn\nnprocs=2\nendcmd\ncmd=barrier_in\n";
        for piece in 1..text.len() {
            let mut reader = LineReader::default();
            let mut inputs = Vec::new();
            for bytes in text.chunks(piece) {
                inputs.extend(reader.handle_bytes(bytes).unwrap());
            }
            let line = |text: &str| Input::Line(text.to_string());
            let block = Input::Block(vec!["nprocs=2".to_string()]);
            assert_eq!(inputs, [line("cmd=init pmi_version=1"), block, line("cmd=barrier_in")]);
        }
    }

    #[test]
    fn long_line_is_refused() {
        let mut reader = LineReader::default();
        let result = reader.handle_bytes(&vec![b'x'; LINE_BYTES_MAX + 1]);
        assert_eq!(result, Err(WireError::LineTooLong));
    }

    #[test]
    fn endless_block_is_refused() {
        let mut reader = LineReader::default();
        reader.handle_bytes(b"mcmd=spawn\n").unwrap();
        let line = [vec![b'x'; 60_000], vec![b'\n']].concat();
        let refused = (0..20).any(|_| reader.handle_bytes(&line).is_err());
        assert!(refused);
        let mut reader = LineReader::default();
        reader.handle_bytes(b"mcmd=spawn\n").unwrap();
        let refused = (0..100).any(|_| reader.handle_bytes(&[b'\n'; 1000]).is_err());
        assert!(refused);
    }

    #[test]
    fn reply_is_one_line() {
        let line = Reply::new("get_result").with("rc", 0).with("value", "x").line();
        assert_eq!(line, "cmd=get_result rc=0 value=x\n");
    }
}
