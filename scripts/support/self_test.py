#!/usr/bin/env python3
"""Checks of what the scripts show: pictures are legible, progress lines contain no output of pip,
`make test` counts what was skipped or repeated, and leaves out what has passed.

`scripts/test.py pictures` runs these checks.
"""

import contextlib
import io
import re
import sys
import tempfile
import unittest
from argparse import Namespace
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "system")]
import test as steps  # noqa: E402
import wheels  # noqa: E402
from common import Checks, PassedCases  # noqa: E402
from support import curves, dots, svg  # noqa: E402
from support.passed import Passed  # noqa: E402

# Width of a letter relative to its height, of a wide bold face: no reader's font is wider.
LETTER = 0.7


class Chart(unittest.TestCase):
    def test_no_words_lie_over_words_or_dots_or_outside(self):
        for low, high in ((0.4, 9.99), (1.8, 5384.4), (10.0, 99999.0), (3.0, 3.0)):
            picture = sample(low, high)
            boxes = [box(element) for element in picture.iter() if element.tag.endswith("}text")]
            dots_there = [dot(e) for e in picture.iter() if e.tag.endswith("}circle")]
            width, height = float(picture.get("width")), float(picture.get("height"))
            for words, left, top, right, bottom in boxes:
                inside = 0 <= left and right <= width and 0 <= top and bottom <= height
                self.assertTrue(inside, f"{words} is outside")
            for number, one in enumerate(boxes):
                for other in [*boxes[number + 1 :], *dots_there]:
                    self.assertFalse(overlap(one, other), f"{one[0]!r} over {other[0]!r}")

    def test_every_value_is_drawn_named_and_written(self):
        text = ElementTree.tostring(sample(1.8, 5384.4), encoding="unicode")
        self.assertEqual(len(re.findall("<[^<]*circle class", text)), 4)
        for words in (">1.8 us<", ">5384 us<", "far, ours: 5384 us", ">link: 5<", ">1000<"):
            self.assertIn(words, text)

    def test_what_has_no_value_has_a_dash_and_no_dot(self):
        rows = [dots.Row("one", [None, 0.25]), dots.Row("two", [5.0, None], True)]
        panels = [dots.Panel("time", "us"), dots.Panel("speed", "MB/s")]
        text = dots.chart("A title", [], panels, [dots.Group("near", rows)])
        self.assertEqual((text.count("<circle"), text.count(">–<")), (2, 2))
        self.assertIn(">0.25 MB/s<", text)

    def test_positions_are_logarithmic(self):
        axis = dots.Axis(100, 0, 2)
        self.assertEqual([axis.at(v) - 100 for v in (1, 10, 100)], [0, dots.PLOT / 2, dots.PLOT])


class Bars(unittest.TestCase):
    def test_a_bar_for_each_value_an_axis_in_round_steps_and_marks(self):
        groups = [("1 MiB", {"one": 119.0, "two": 240.0}), ("4 MiB", {"two": 0.0})]
        text = svg.bars("A title", groups, "MB/s", [(250.0, "link")])
        ElementTree.fromstring(text)
        self.assertEqual(text.count("<rect x"), 3 + 2)  # bars, and a box for each series
        for words in (">0<", ">50<", ">250<", ">link<", "two: 240 MB/s"):
            self.assertIn(words, text)
        self.assertNotIn(">300<", text)

    def test_nothing_to_draw_is_a_picture_too(self):
        ElementTree.fromstring(svg.bars("A title", []))


class Curves(unittest.TestCase):
    def test_a_line_for_each_curve_and_the_first_and_last_power_at_the_edges(self):
        panel = curves.Panel("latency", "us", {"one": {1: 1.0, 1024: 100.0}, "two": {1: 10.0}})
        text = curves.chart("A title", [panel, panel, panel])
        ElementTree.fromstring(text)
        self.assertEqual(text.count("<polyline"), 6)
        for words in (">1 KiB<", ">1 B<", ">100<", ">latency, us<", "<title>two</title>"):
            self.assertIn(words, text)
        frame = curves.frame_of(panel, 10, 20)
        self.assertEqual((frame.across(1), frame.down(1)), (10, 20 + curves.HEIGHT))
        self.assertEqual((frame.across(1024), frame.down(100)), (10 + curves.WIDTH, 20))

    def test_nothing_to_draw_is_a_picture_too(self):
        ElementTree.fromstring(curves.chart("A title", [curves.Panel("x", "y", {})]))


class Progress(unittest.TestCase):
    def test_a_package_is_a_name_a_version_and_a_size(self):
        for line, wanted in (
            ("Downloading impi_rt-2021.18.1-py2.py3-none-any.whl (128.8 MB)\n",
             "impi-rt 2021.18.1, 128.8 MB"),
            ("  Using cached numpy-2.4.6-cp311-cp311-linux_x86_64.whl\n", "numpy 2.4.6"),
            ("  Downloading https://a.example/b/mpi4py-4.1.2.tar.gz (501 kB)\n",
             "mpi4py 4.1.2, 501 kB"),
            ("  Downloading mpi4py-4.1.2-cp311-linux_x86_64.whl.metadata (9 kB)\n", ""),
            ("Collecting mpich==5.0.2\n", ""),
        ):
            self.assertEqual(wheels.progress(line), wanted)


class Summary(unittest.TestCase):
    """What `make test` says about tests inside a step."""

    CRATES = """\
        PASS [   0.015s] ( 1/12) landbridge-launch::ssh a_host_is_reached
    skipped: there is no sshd
  TRY 1 FAIL [   0.2s] ( 2/12) landbridge-relay::cut a_wan_is_cut
    skipped: 2 hosts are missing
     Summary [  9.401s] 12 tests run: 12 passed (1 flaky), 3 skipped
   FLAKY 2/3 [   0.120s] ( 2/12) landbridge-relay::cut a_wan_is_cut
"""

    def test_skipped_tests_do_not_count_as_passed(self):
        step = steps.Step("rust", "", ["cargo"])
        note = steps.remark(step, self.CRATES)
        self.assertIn("12 tests run: 10 passed (1 flaky), 3 skipped; ", note)
        self.assertIn("; 2 could not run here: 2 hosts are missing, there is no sshd", note)

    def test_flaky_tests_are_named(self):
        for line in ("   FLAKY 2/3 [   0.120s] ( 2/12) a::b c\n", "   FLAKY 2/3 [   0.120s] a::b c\n"):
            self.assertEqual(steps.flaky_tests(line * 2), ["a::b c"])

    def test_skipped_cases_of_a_driver_are_counted(self):
        output = "skipped: 3 cases with a lab: no root\nok  1.0 s  one\nskipped: two: no moto\n5 checks, 0 failed\n"
        self.assertEqual(len(steps.skips(output)), 4)
        note = steps.remark(steps.Step("system-kills", "", [sys.executable]), output)
        self.assertEqual(note, "5 checks, 0 failed; 4 could not run here: 3 cases with a lab: no root, two: no moto")

    def test_the_last_line_counts_them(self):
        step = steps.Step("rust", "", ["cargo"])
        rows = [steps.Row(step, "passed", "", 1.0, skipped=4), steps.Row(step, "skipped", "", 1.0)]
        wanted = "1 passed, 0 failed, 1 skipped; 4 tests and cases inside steps were skipped: 4 of rust"
        self.assertEqual(steps.counts(rows), wanted)

    def test_the_table_has_the_time_of_what_was_prepared_and_the_names_of_flaky_tests(self):
        rows = [steps.Row(steps.Step("rust", "", []), "passed", "all", 5.0, repeated=["a::b c"])]
        prepared = [steps.Row(steps.Step("build", "", []), "passed", "", 61.0)]
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            code = steps.summarise(prepared, rows, 5.0, [])
        self.assertEqual(code, 0)
        self.assertRegex(shown.getvalue(), r"(?m)^build +passed +61s +before the first step$")
        self.assertIn("passed only when they were run again: 1: a::b c\n", shown.getvalue())


class EarlierRuns(unittest.TestCase):
    def test_a_step_counts_on_its_commit_with_its_command(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "passed.json"
            step = steps.Step("rust", "tests", ["cargo", "test"])
            outcome = {"note": "9 tests", "seconds": 8.0, "busy_s": 9.0, "repeated": ["it"], "skipped": 2, "at": "now"}
            Passed(file, "one").note(step.name, step.command, outcome)
            [row] = steps.earlier_rows([step, steps.Step("other", "", ["x"])], Passed(file, "one"))
            self.assertEqual((row.step, row.result, row.skipped, row.repeated), (step, "passed", 2, ["it"]))
            self.assertIn("earlier", row.note)
            self.assertIsNone(Passed(file, "one").find(step.name, ["cargo", "test", "--all"]))
            self.assertIsNone(Passed(file, "two").find(step.name, step.command))
            # Something was changed since the commit.
            Passed(file, "").note(step.name, step.command, outcome)
            self.assertIsNone(Passed(file, "").find(step.name, step.command))

    def test_a_case_counts_until_a_check_of_it_fails(self):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            file = Path(folder) / "cases"
            first = [("one", [True]), ("two", [True, False]), ("none", []), ("three", [True])]
            self.assertEqual(self.run_cases(file, first), (["one", "two", "none", "three"], 1))
            second = [("one", [True]), ("two", [True, True]), ("three", [True])]
            self.assertEqual(self.run_cases(file, second), (["two"], 0))
            self.assertEqual(self.run_cases(file, second), ([], 0))
            # A check of a case that has ended fails later.
            cases = PassedCases(file)
            cases.note("two: no file is left", False)
            self.assertEqual(file.read_text().split(), ["one", "three"])
            # A driver asks for all first.
            self.assertTrue(all(cases.begins(name, 0, 0) for name in ("four", "five", "six")))
            for name, is_ok in (("four", True), ("five", False), ("five", True), ("six: a part", True)):
                cases.note(name, is_ok)
            self.assertEqual(file.read_text().split(), ["one", "three", "four"])

    def run_cases(self, file: Path, cases) -> tuple[list[str], int]:
        checks = Checks(Namespace(only=None, list=False, sample=False, set=[], passed=file))
        ran = []
        for name, outcomes in cases:
            if checks.wants(name):
                ran.append(name)
                for is_ok in outcomes:
                    checks.check(f"{name}: it holds", is_ok, "measured")
        return ran, checks.end()


def sample(low: float, high: float):
    rows = [dots.Row("ours", [high, low], True), dots.Row("direct: another way", [low, high])]
    panels = [dots.Panel("time (lower is better)", "us"), dots.Panel("speed (higher)", "MB/s")]
    marks = [(high * 0.9, "link: 5"), (low * 1.1, "link: 1")]
    groups = [dots.Group("near", []), dots.Group("far", rows, marks)]
    return ElementTree.fromstring(dots.chart("A title", ["A note."], panels, groups))


def box(element) -> tuple:
    """(words, left, top, right, bottom) of a text element."""
    size, x, y = (float(element.get(key)) for key in ("font-size", "x", "y"))
    wide = LETTER * size * len(element.text)
    left = x - {"start": 0, "middle": wide / 2, "end": wide}[element.get("text-anchor")]
    return element.text, left, y - size, left + wide, y + 0.25 * size


def dot(element) -> tuple:
    x, y, radius = (float(element.get(key)) for key in ("cx", "cy", "r"))
    return "a dot", x - radius, y - radius, x + radius, y + radius


def overlap(one: tuple, other: tuple) -> bool:
    (_, left, top, right, bottom), (_, x1, y1, x2, y2) = one, other
    return left < x2 and x1 < right and top < y2 and y1 < bottom


if __name__ == "__main__":
    unittest.main()
