"""Reports: what is written, read back, and shown as Markdown, picture and web page."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from matplotlib.figure import Figure
from rich.console import Console
from typer.testing import CliRunner

from radix_pages_sglang import cli
from radix_pages_sglang.experiments import picture, report, shown
from radix_pages_sglang.experiments.markdown import escaped, markdown
from radix_pages_sglang.experiments.results import Chart, Result, Series, Table, as_read, read
from radix_pages_sglang.experiments.web_page import index, web_page
from radix_pages_sglang.serve import CommandError
from tests.watch.browser import chromium

NASTY = "<script>alert('x')</script> | a_b *c* `d` & [e](http://f) $g$ ~h~"
SPECIAL = "ab1 .,)(#+-=*_`<>[]|~$&;!:/\\\n'\""


def result(title="A result", tables=(), charts=(), **parts) -> Result:
    parts = {"parameters": {}, "summary": ["It came out."], **parts}
    provenance = {"commit": "abc", "seed": "7"}
    return as_read(Result("sample", title, provenance, tables=tables, charts=charts, **parts))


def bars(**values) -> Chart:
    return Chart("Bars", "side", "s", [Series("", list(values), list(values.values()))], "bar")


class Seen(HTMLParser):
    """What a reader of some HTML sees, and what a browser would do with it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text, self.tags, self.attributes = "", [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value) for name, value in attrs if value is not None]

    def handle_data(self, data):
        self.text += data


def test_what_was_written_is_read_back(tmp_path):
    written = result(
        tables=[Table("t", ["a", "b"], [["x", None], [True, 0.1]], "note")],
        charts=[Chart("c", "x", "y", [Series("s", [1.5, 2], [None, 3], [0, 1], [1, 2], True)], "step", True)],
        parameters={"blocks": [1, 2]},
        limits=["no GPU"],
        values={"rows": [{"hit_rate": 0.5}]},
    )
    written.write(tmp_path / "r.json")
    assert read(tmp_path / "r.json") == written


def test_documented_keys_stand_at_the_top_of_the_file(tmp_path):
    result(values={"hit_rate": 0.25}).write(tmp_path / "r.json")
    assert json.loads((tmp_path / "r.json").read_text())["hit_rate"] == 0.25


def test_a_key_called_report_is_refused():
    with pytest.raises(ValueError, match="report is no name for a value"):
        result(values={"report": 1})


def test_numpy_numbers_paths_and_tuples_are_written_as_what_they_mean():
    values = {"n": np.int64(3), "p": Path("a/b"), "t": (1, 2), "a": np.arange(2), "b": np.bool_(True), 5: "five"}
    assert result(values=values).values == {"n": 3, "p": "a/b", "t": [1, 2], "a": [0, 1], "b": True, "5": "five"}


def test_what_is_not_a_number_is_written_as_nothing():
    assert result(values={"v": [float("nan"), np.inf, 1.5]}).values == {"v": [None, None, 1.5]}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1}', "it has no report"),
        ("[]", "it has no report"),
        ("{", "Expecting property name"),
        ('{"report": {}}', "it lacks 'tables'"),
        ('{"report": {"tables": [], "charts": [], "colour": 1}}', "unexpected keyword argument 'colour'"),
    ],
)
def test_a_file_that_is_no_report_is_refused_by_name(tmp_path, text, reason):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path} was not written by radix-pages experiment")) as refusal:
        read(path)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ([1234567, 5], ["1,234,567", "5"]),
        ([0.5, 0.25, 1.0], ["0.50", "0.25", "1.00"]),
        ([12.34567, 0.5], ["12.35", "0.50"]),
        ([98765.4321, 2.5, 0.001], ["98,765", "2.5", "0.001"]),
        ([178.51, 1.366, 1.0], ["178.5", "1.37", "1.0"]),
        ([4.194e-7], ["4.19e-07"]),
        ([1.0, 2.0], ["1", "2"]),
        ([0.0, 0.123], ["0.000", "0.123"]),
        ([None, True, False, "1e3"], ["", "yes", "no", "1e3"]),
        ([-1234.5], ["-1,234"]),
    ],
)
def test_a_column_is_rounded_to_the_digits_of_its_largest_number(values, texts):
    assert shown.column(values) == texts


@pytest.mark.parametrize(
    ("value", "text"),
    [(30000, "30000"), ([1, 2], "1, 2"), (None, "none"), (0.25, "0.25"), (True, "yes"), ({"a": 1.5}, "a 1.5")],
)
def test_a_parameter_is_shown_as_it_would_be_typed(value, text):
    assert shown.parameter(value) == text


@given(st.text(SPECIAL, min_size=1).filter(str.strip))
def test_markdown_shows_every_text_as_it_is(text):
    renderer = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    table = Table("t", ["c"], [[text]])
    html = renderer.render(markdown(result(summary=[text], tables=[table]), None))
    item, cell = re.search(r"<li>(.*?)</li>", html, re.DOTALL), re.search(r"<td>(.*?)</td>", html, re.DOTALL)
    assert Seen(item[1]).text.split() == text.split()
    assert Seen(cell[1]).text.split() == text.split()


@pytest.mark.parametrize("text", ["radix_pages", "0.60", "-3.5", "H2O & random", "1,234.5", "a (b)"])
def test_plain_words_and_numbers_stay_readable_in_markdown(text):
    assert escaped(text) == text


def test_markdown_has_title_origin_summary_tables_parameters_and_limits_in_this_order():
    table = Table("Rates", ["side", "rate"], [["ours", 0.5], ["stock", None]], "rate: hits / asked")
    page = markdown(result(tables=[table], parameters={"blocks": [1, 2]}, limits=["No GPU."]), None)
    assert page == (
        "# A result\n\ncommit abc; seed 7\n\n- It came out.\n\n## Rates\n\nrate: hits / asked\n\n"
        "| side | rate |\n| --- | ---: |\n| ours | 0.5 |\n| stock |  |\n\n"
        "## Parameters\n\n- blocks: 1, 2\n\n## What this does not show\n\n- No GPU.\n"
    )


def test_no_text_of_a_result_becomes_a_tag_of_the_page():
    table = Table(NASTY, [NASTY], [[NASTY]], NASTY)
    nasty = result(NASTY, [table], summary=[NASTY], parameters={NASTY: NASTY}, limits=[NASTY])
    seen = Seen(web_page(nasty, None))
    assert seen.tags.count("script") == 1  # the page's own
    assert seen.text.count(NASTY) == 10  # head, title, four of the table, summary, parameter and its value, limit


def test_the_page_loads_nothing_from_elsewhere(tmp_path):
    report.render(result(tables=[Table("t", ["a"], [[1]])], charts=[bars(ours=1)]), tmp_path)
    page = (tmp_path / "report.html").read_text()
    places = [value for name, value in Seen(page).attributes if name in ("src", "href", "action", "srcset")]
    assert [place[:22] for place in places] == ["data:image/png;base64,"]
    assert "url(" not in page
    assert "@import" not in page


def test_the_page_holds_the_picture(tmp_path):
    report.render(result(charts=[bars(ours=1)]), tmp_path)
    attributes = dict(Seen((tmp_path / "report.html").read_text()).attributes)
    assert base64.b64decode(attributes["src"].partition(",")[2]) == (tmp_path / "report.png").read_bytes()


def test_cells_carry_the_whole_number_to_sort_by():
    page = web_page(result(tables=[Table("t", ["a"], [[1234.5678], ["x"]])]), None)
    assert '<td class="number" data-number="1234.5678">1,235</td>' in page
    assert '<td class="number">x</td>' in page


def test_a_click_on_a_heading_sorts_by_number_up_then_down_and_empty_cells_last():
    rows = [["x", 900.0], ["y", 10_000.5], ["z", None], ["w", 0.25]]
    page = web_page(result(tables=[Table("t", ["name", "n"], rows)]), None)
    seen = []
    with chromium() as browser:
        tab = browser.new_page()
        tab.set_content(page)
        for heading in ("n", "n", "name"):
            tab.locator("th").get_by_text(heading, exact=True).click()
            seen.append("".join(tab.locator("tbody td:first-child").all_inner_texts()))
    assert seen == ["wxyz", "yxwz", "wxyz"]


def test_an_index_leads_to_every_report():
    page = Seen(index([("a/report.html", result("First")), ("b/report.html", result("Second"))]))
    assert [value for name, value in page.attributes if name == "href"] == ["a/report.html", "b/report.html"]
    assert "First" in page.text
    assert "Second" in page.text


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws charts and returns the panels."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))

    def draw(*charts):
        picture.draw(charts, tmp_path / "p.png")
        return figures[-1].axes

    return draw


def test_a_line_leaves_a_gap_where_nothing_was_measured(drawn):
    (panel,) = drawn(Chart("c", "x", "y", [Series("s", [1, 2, 3], [4, None, 6])]))
    np.testing.assert_array_equal(panel.lines[0].get_ydata(), [4, np.nan, 6])


@pytest.mark.parametrize("kind", ["line", "step"])
def test_an_interval_is_a_band_around_a_line(drawn, kind):
    (panel,) = drawn(Chart("c", "x", "y", [Series("s", [1, 2], [4, 5], [3, 4], [6, 7])], kind))
    heights = panel.collections[0].get_paths()[0].vertices[:, 1]
    assert (heights.min(), heights.max()) == (3, 7)


@pytest.mark.parametrize("kind", ["scatter", "bar"])
def test_an_interval_is_a_bar_at_a_point(drawn, kind):
    (panel,) = drawn(Chart("c", "x", "y", [Series("s", [1], [4], [3], [6])], kind))
    (lines,) = panel.collections
    assert [tuple(end[1] for end in segment) for segment in lines.get_segments()] == [(3, 6)]


def test_a_stair_keeps_a_value_until_the_next_point(drawn):
    (panel,) = drawn(Chart("c", "x", "y", [Series("s", [0, 10], [1, 5])], "step"))
    assert panel.lines[0].get_drawstyle() == "steps-post"


def test_bars_stand_side_by_side_at_their_names(drawn):
    series = [Series("ours", ["a", "b"], [1, 2]), Series("stock", ["b", "c"], [3, None])]
    (panel,) = drawn(Chart("c", "side", "y", series, "bar"))
    assert [text.get_text() for text in panel.get_xticklabels()] == ["a", "b", "c"]
    assert [round(bar.get_x() + bar.get_width() / 2) for bar in panel.patches] == [0, 1, 1, 2]
    np.testing.assert_array_equal([bar.get_height() for bar in panel.patches], [1, 2, 3, np.nan])


def test_bars_with_long_names_lie_and_the_first_is_on_top(drawn):
    names = [f"a strategy with a long name {number}" for number in range(3)]
    (panel,) = drawn(Chart("c", "strategy", "pages", [Series("", names, [1, 2, 3])], "bar"))
    assert [text.get_text() for text in panel.get_yticklabels()] == names
    assert panel.yaxis_inverted()
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("pages", "strategy")


def test_a_logarithmic_axis_names_the_sizes_that_were_measured(drawn):
    (panel,) = drawn(Chart("c", "blocks", "y", [Series("s", [1000, 30000], [1, 2])], is_x_log=True))
    assert [text.get_text() for text in panel.get_xticklabels()] == ["1,000", "30,000"]


def test_a_label_has_one_colour_in_all_panels(drawn):
    first, second = drawn(
        Chart("a", "x", "y", [Series("ours", [1], [1]), Series("stock", [1], [2])]),
        Chart("b", "x", "y", [Series("stock", [1], [2])]),
    )
    assert second.lines[0].get_color() == first.lines[1].get_color() != first.lines[0].get_color()


def test_dollars_in_labels_are_no_formulas(tmp_path):
    picture.draw([Chart("$a_{$ b", "$", "x^$", [Series("$\\frac$", [1], [1])])], tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_without_charts_has_no_picture(tmp_path):
    report.render(result(charts=[bars(ours=1)]), tmp_path)
    report.render(result(), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.json", "report.md"]
    assert "report.png" not in (tmp_path / "report.md").read_text()


def test_finish_shows_and_writes_what_was_asked_for(tmp_path, capsys):
    done = result(tables=[Table("Rates", ["rate"], [[0.5]])], charts=[bars(ours=1)], values={"rate": 0.5})
    report.finish(done, tmp_path / "out", tmp_path / "r.json")
    told = capsys.readouterr().out
    assert "Rates" in told
    assert "It came out." in told
    assert read(tmp_path / "r.json") == read(tmp_path / "out" / "report.json") == done


def test_square_brackets_are_shown_on_a_terminal_as_they_are():
    console = Console(width=100, record=True)
    report.show(result(tables=[Table("[b]t[/b]", ["[i]c"], [["[red]cell"]])]), console)
    told = console.export_text()
    assert all(text in told for text in ("[b]t[/b]", "[i]c", "[red]cell"))


def test_a_long_table_is_shown_in_part_on_a_terminal_and_says_so():
    console = Console(width=100, record=True)
    report.show(result(tables=[Table("t", ["n"], [[7000 + number] for number in range(1041)])]), console)
    told = console.export_text()
    assert "7,039" in told
    assert "7,040" not in told
    assert "1,001 more rows" in told


def test_places_that_cannot_be_written_are_refused_by_name(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for out, json_file, line in (
        (file, None, f"--out {file} is a file: name a directory for the report"),
        (file / "sub", None, f"--out {file / 'sub'}: {file} is a file: name a directory for the report"),
        (None, tmp_path, f"--json {tmp_path} is a directory: name a file in it"),
        (None, tmp_path / "no" / "f", f"--json {tmp_path / 'no' / 'f'}: there is no directory {tmp_path / 'no'}"),
    ):
        with pytest.raises(CommandError) as refusal:
            report.check_places(out, json_file)
        assert str(refusal.value).startswith(line)


def test_without_matplotlib_a_report_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match=re.escape('pip install "radix-pages[experiments]"')):
        report.check_places(tmp_path / "out", None)
    report.check_places(None, tmp_path / "r.json")  # JSON alone needs no pictures


def run(*argv):
    return CliRunner().invoke(cli.app, ["report", *map(str, argv)])


def test_rendering_again_gives_the_same_files(tmp_path):
    tables, charts = [Table("t", ("a",), [(np.float64(np.pi),), (float("nan"),)])], [bars(ours=1, stock=2.5)]
    report.render(Result("sample", "Title", {"seed": "1"}, {"p": (1, 2)}, ["s"], tables, charts), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in ("report.md", "report.png", "report.html"):
        (tmp_path / name).unlink()
    done = run(tmp_path)
    assert (done.exit_code, done.stdout) == (0, f"{tmp_path / 'report'}.html: Title\n")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_several_reports_get_an_index(tmp_path):
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        result(f"Title {name}").write(tmp_path / name / "report.json")
    done = run(tmp_path)
    assert done.stdout.splitlines() == [
        f"{tmp_path}/a/report.html: Title a",
        f"{tmp_path}/b/report.html: Title b",
        f"{tmp_path}/index.html: all of them",
    ]
    links = [value for name, value in Seen((tmp_path / "index.html").read_text()).attributes if name == "href"]
    assert links == ["a/report.html", "b/report.html"]


def test_a_directory_without_reports_is_refused_by_name(tmp_path):
    for folder, line in (
        (tmp_path / "no", f"there is no directory {tmp_path / 'no'}: "),
        (tmp_path, f"no report.json in {tmp_path} or in a directory of it: "),
    ):
        done = run(folder)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
        assert done.stderr.startswith(f"radix-pages: {line}")


def test_one_foreign_report_stops_before_anything_is_rendered(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    result().write(tmp_path / "a" / "report.json")
    (tmp_path / "b" / "report.json").write_text("{}")
    done = run(tmp_path)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"radix-pages: {tmp_path / 'b' / 'report.json'} was not written by")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["report.json"]
