//! A status line at the bottom of the user's terminal, which disappears when there is no status.
//!
//! The module is pure: the wanted text enters, and the bytes that other code has written to the
//! terminal; bytes for the terminal leave. The status line never mixes with output: it is erased
//! before anything else is written, and drawn again only when the cursor is at the start of a line.

/// Moves the cursor to the first column and erases the line from there on.
const ERASE: &[u8] = b"\r\x1b[K";

#[derive(Debug)]
pub struct TerminalStatusLine {
    /// Whether standard error is a terminal; if not, nothing is ever drawn.
    is_terminal: bool,
    wanted: Option<String>,
    shown: Option<String>,
    is_at_line_start: bool,
}

impl TerminalStatusLine {
    pub fn new(is_terminal: bool) -> TerminalStatusLine {
        TerminalStatusLine { is_terminal, wanted: None, shown: None, is_at_line_start: true }
    }

    pub fn is_terminal(&self) -> bool {
        self.is_terminal
    }

    pub fn set(&mut self, text: Option<String>) {
        self.wanted = text;
    }

    /// The bytes that have to be written before anything else is; `others_write` says that other
    /// output is about to be written.
    pub fn erase(&self, others_write: bool) -> Option<&'static [u8]> {
        let is_in_the_way = others_write || self.wanted != self.shown;
        (self.shown.is_some() && is_in_the_way).then_some(ERASE)
    }

    /// Records that the bytes of [`TerminalStatusLine::erase`] have been written.
    pub fn handle_erased(&mut self) {
        self.shown = None;
    }

    /// Records bytes that other code has written to the terminal.
    pub fn handle_written(&mut self, bytes: &[u8]) {
        self.is_at_line_start = bytes.last().map_or(self.is_at_line_start, |&last| last == b'\n');
    }

    /// The status line as it is to be drawn now, shortened to less than `columns` columns.
    pub fn line(&self, columns: usize) -> Option<String> {
        let can_be = self.is_terminal && self.is_at_line_start && self.shown.is_none();
        let text = self.wanted.as_ref().filter(|_| can_be)?;
        // Some terminals begin a new line when a character is written in the last column.
        Some(text.chars().take(columns.saturating_sub(1)).collect())
    }

    /// Records that the status line has been drawn.
    pub fn handle_drawn(&mut self) {
        self.shown.clone_from(&self.wanted);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_goes_before_anything_else_is_written_and_comes_back_after_a_whole_line() {
        let mut status = TerminalStatusLine::new(true);
        assert_eq!((status.erase(true), status.line(80)), (None, None));
        status.set(Some("3 ranks up".to_string()));
        assert_eq!(status.line(80).as_deref(), Some("3 ranks up"));
        status.handle_drawn();
        assert_eq!((status.line(80), status.erase(false)), (None, None));
        assert_eq!(status.erase(true), Some(ERASE));
        status.handle_erased();
        status.handle_written(b"half a line");
        assert_eq!(status.line(80), None, "it would be overwritten");
        status.handle_written(b" ends\n");
        assert_eq!(status.line(6).as_deref(), Some("3 ran"));
        status.handle_drawn();
        status.set(None);
        assert_eq!(status.erase(false), Some(ERASE));
        status.handle_erased();
        assert_eq!((status.erase(true), status.line(80)), (None, None));
    }

    #[test]
    fn without_a_terminal_there_is_none() {
        let mut status = TerminalStatusLine::new(false);
        status.set(Some("x".to_string()));
        assert_eq!((status.erase(true), status.line(80)), (None, None));
    }
}
