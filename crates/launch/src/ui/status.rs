//! A line at the foot of the user's terminal that says how things stand, and goes when there is nothing to say.
//!
//! Pure: what is to be said enters, and what has been written there by others; bytes for the terminal leave. The line is
//! never in the way of output: it is taken away before anything else is written, and drawn again only when the
//! cursor is at the start of a line.

/// To the first column, and nothing from there on.
const ERASE: &[u8] = b"\r\x1b[K";

#[derive(Debug)]
pub struct TerminalStatusLine {
    /// Without one, nothing is ever drawn.
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

    /// What has to be written before anything else is; `others_write`: something else is about to be.
    pub fn erase(&self, others_write: bool) -> Option<&'static [u8]> {
        let is_in_the_way = others_write || self.wanted != self.shown;
        (self.shown.is_some() && is_in_the_way).then_some(ERASE)
    }

    /// It has been written.
    pub fn handle_erased(&mut self) {
        self.shown = None;
    }

    /// Others have written this.
    pub fn handle_written(&mut self, bytes: &[u8]) {
        self.is_at_line_start = bytes.last().map_or(self.is_at_line_start, |&last| last == b'\n');
    }

    /// The line as it is to be drawn now, so that it fits into so many columns.
    pub fn line(&self, columns: usize) -> Option<String> {
        let can_be = self.is_terminal && self.is_at_line_start && self.shown.is_none();
        let text = self.wanted.as_ref().filter(|_| can_be)?;
        // In the last column some terminals begin a new line.
        Some(text.chars().take(columns.saturating_sub(1)).collect())
    }

    /// It has been drawn.
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
