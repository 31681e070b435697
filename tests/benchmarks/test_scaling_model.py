"""benchmarks/scaling_model.py: its laws, the figures it is held against, and the page it fills."""

import csv
import re
import subprocess
import sys
from argparse import Namespace
from itertools import pairwise
from statistics import median

import pytest
from engine.diagnostics.memory import persistent_bytes
from fresh import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from running import SCREENED

BENCHMARKS, PAGE = ROOT / "benchmarks", ROOT / "docs" / "scaling.md"
PAGES = (PAGE, BENCHMARKS / "scaling_model.md")
sys.path.append(str(BENCHMARKS))
import scaling_model as model  # noqa: E402

MB = 10**6
SIZES = st.floats(1.0, 1e11)
GPUS = st.integers(1, 8192)
CLUSTERS = st.sampled_from(list(model.NETWORKS.values()))
FREE = model.Cluster(gbits=1e30, nvlink=1e30)  # of infinite bandwidth


@pytest.mark.parametrize("gpus", [2, 4, 8, 64, 4096])
def test_a_ring_sends_what_the_closed_form_says(gpus):
    sending = model.ring(500 * MB, gpus, model.BEST) - model.ring(0, gpus, model.BEST)
    expected = 2 * (gpus - 1) / gpus * 500 * MB / model.BEST.bandwidth(gpus)
    assert sending == pytest.approx(expected)


def test_without_a_limit_of_bandwidth_only_the_latency_is_left():
    for way in (model.ring, model.tree):
        assert way(1, 64, FREE) == pytest.approx(way(10**12, 64, FREE))
    assert model.ring(1, 8, FREE) == pytest.approx(8.4e-6 + 14 * 3.4e-6)
    assert model.ring(1, 16, FREE) == pytest.approx(8.4e-6 + 28 * 3.4e-6 + 2 * 14e-6)
    assert model.tree(1, 64, FREE) == pytest.approx(14e-6 + 2 * (7 * 1.25e-6 + 3 * 8.5e-6))


def test_the_ring_is_for_few_gpus_and_much_to_send_the_tree_for_many():
    assert model.all_reduce(500 * MB, 8, model.BEST) == model.ring(500 * MB, 8, model.BEST)
    assert model.all_reduce(25 * MB, 4096, model.BEST) == model.tree(25 * MB, 4096, model.BEST)


def test_the_slowest_link_decides():
    one_card = model.Cluster(nics=1, gbits=100)
    assert one_card.bandwidth(8) == model.NVLINK
    assert one_card.bandwidth(9) == pytest.approx(100e9 / 8 * 0.94)
    assert model.Cluster(nics=100).bandwidth(9) == model.NVLINK


@settings(deadline=None)
@given(SIZES, CLUSTERS)
def test_one_gpu_sends_nothing_and_waits_for_nobody(size, cluster):
    work = model.Work(0.04, gradients=size)
    assert model.predict(work, 1, cluster) == (0.04, 0.0, 0.0)
    assert model.efficiency(work, 1, cluster) == 1.0


@settings(deadline=None)
@given(SIZES, st.integers(2, 4096), CLUSTERS)
def test_more_gpus_and_more_bytes_are_never_faster(size, gpus, cluster):
    few = model.all_reduce(size, gpus, cluster)
    assert model.all_reduce(size, gpus * 2, cluster) >= few
    assert model.all_reduce(size * 2, gpus, cluster) >= few
    work = model.Work(0.04, gradients=size)
    assert model.efficiency(work, gpus * 2, cluster) <= model.efficiency(work, gpus, cluster)


@settings(deadline=None)
@given(SIZES, st.sampled_from([1, 5, 25, 100]))
def test_buckets_hold_all_gradients(size, megabytes):
    found = model.buckets(size, megabytes * MB)
    assert sum(found) == pytest.approx(size)
    assert max(found) <= megabytes * MB
    assert min(found) > 0


@settings(deadline=None)
@given(SIZES, GPUS, CLUSTERS, st.floats(0.0, 10.0))
def test_what_sticks_out_is_the_last_bucket_at_least_and_all_at_most(size, gpus, cluster, backward):
    sent = [model.all_reduce(part, gpus, cluster) for part in model.buckets(size)]
    late = model.exposed(backward, size, gpus, cluster)
    assert sent[-1] * (1 - 1e-6) - 1e-9 <= late <= sum(sent) * (1 + 1e-6)


def test_a_long_backward_pass_hides_all_but_the_last_bucket():
    *_, last = model.buckets(100 * MB)
    alone = model.all_reduce(last, 64, model.BEST)
    assert model.exposed(10.0, 100 * MB, 64, model.BEST) == pytest.approx(alone)


def test_the_longest_of_gpu_cpu_and_loader_counts():
    for busy in (model.Work(3.0, 1.0, 2.0), model.Work(1.0, 2.0, 3.0)):
        assert busy.seconds == 3.0
    assert model.predict(model.Work(1.0, cpu=2.0), 1, FREE).alone == 2.0
    assert model.predict(model.Work(1.0, cpu=2.0), 2, FREE).alone == 2.0 + model.FITTED.ddp


def test_accumulation_sends_once():
    four = model.Work(0.16, micro_batches=4)
    assert model.predict(four, 64, model.BEST).sending == pytest.approx(
        model.predict(model.Work(0.04), 64, model.BEST).sending
    )


def test_the_expected_maximum_is_that_of_the_tables_of_order_statistics():
    for count, expected in ((4, 1.0294), (10, 1.5388), (100, 2.5076), (1000, 3.2414)):
        assert model.expected_maximum(count) == pytest.approx(expected, rel=0.02)


def test_youngs_interval_loses_least():
    apart, interval, lost = model.failures(1024, 16e9)
    assert apart == pytest.approx(model.GPU_HOURS_TO_FAILURE * 3600 / 1024)
    for other in (interval / 2, interval * 2):
        saving, again = 8.0 / other, (other / 2 + model.RESTART) / apart
        assert saving + again > lost


def test_measured_figures():
    """The tolerances are what the model reaches, and what the pages state."""
    held_out = [one for one in model.MEASURED if not one.use]
    places = {(32, 4), (32, 2), (256, 2), (256, 4), (256, 8)}
    assert {(one.batch, one.gpus) for one in held_out} == places
    for one in model.MEASURED:
        within = 0.27 if "slower" in one.what else 0.05 if one.on_cpu else 0.02
        if one.what == "the same model, compiled":
            within = 0.04
        assert model.modelled(one) == pytest.approx(one.seconds, rel=within), one


def test_each_fitted_figure_is_predicted_by_the_others(monkeypatch):
    fitted = [one for one in model.MEASURED if one.use == "noise"]
    for one in fitted:
        others = [other for other in model.MEASURED if other is not one]
        monkeypatch.setattr(model, "MEASURED", others)
        monkeypatch.setattr(model, "FITTED", model.fit())
        assert model.modelled(one) == pytest.approx(one.seconds, rel=0.025), one
        monkeypatch.undo()


def test_the_empty_step_and_the_image_are_those_of_two_measured_steps():
    compiled = median(turns("step_compiled.csv", "contestant", "project-compile-O1", "seconds"))
    assert model.resnet50(256).seconds == pytest.approx(compiled, rel=1e-3)
    assert model.resnet50(32, "graphs").seconds == pytest.approx(model.GRAPHS_32)
    assert model.resnet50(256, "eager").seconds == pytest.approx(model.O1)


OF_MAIN = {
    "main.py, O1": ("scaling.csv", "project-O1"),
    "main.py, O1, a host with eight": ("scaling_8.csv", "project-O1"),
    "main.py, CUDA graphs": ("scaling_small.csv", "project-graphs-O1"),
}


def test_figures_of_main_are_those_of_the_results():
    for one in model.MEASURED:
        if one.what in OF_MAIN:
            file, name = OF_MAIN[one.what]
            for gpus, seconds in ((1, one.alone), (one.gpus, one.seconds)):
                rows = turns(file, "name", name, "seconds", gpus=str(gpus))
                assert seconds == pytest.approx(median(rows), rel=1e-3), one
    synced = {
        "the same model, compiled": [
            median(turns(file, "variant", "compiled-none", "ms_per_step"))
            for file in ("syncbn.csv", "syncbn_slow.csv", "syncbn_graphs.csv")
        ],
        "the same model, CUDA graphs": turns(
            "syncbn_graphs.csv", "variant", "graphs-none", "ms_per_step"
        ),
    }
    for what, milliseconds in synced.items():
        (one,) = (one for one in model.MEASURED if one.what == what)
        assert one.seconds == pytest.approx(median(milliseconds) / 1e3, rel=1e-3), one
    results = " ".join((BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8").split())
    assert "Eager steps had 18.5, 25.6 and 29.6 ms" in results
    assert "| files, `--decode cpu` | 3,325 |" in results


def turns(file, column, name, value, **others):
    wanted = {column: name} | others
    with (BENCHMARKS / file).open() as lines:
        rows = list(csv.DictReader(lines))
    return [float(row[value]) for row in rows if wanted.items() <= row.items()]


def test_published_figures():
    predicted = [(one, speed) for one, speed in model.published() if speed]
    assert len(predicted) == 10
    assert max(one.gpus for one, _ in predicted) == 4216
    for one, speed in predicted:
        exact = 16 <= one.gpus <= 1024 or "TF32" in one.what
        assert speed == pytest.approx(one.per_second, rel=0.06 if exact else 0.15), one


def test_the_page_has_the_tables_that_the_program_prints():
    page = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert sorted(re.findall(r"<!-- table: (\w+) -->", page)) == sorted(model.TABLES)
    assert page.count("<!-- end -->") == len(model.TABLES)
    assert model.fill(page) == page, "python benchmarks/scaling_model.py --write"


def test_the_numbers_in_the_pages_sentences_are_still_these():
    graphs, eager = (
        model.predict(model.resnet50(32, how), 1024, model.BEST) for how in ("graphs", "eager")
    )
    some, most = ([run for run in model.RUNS if run[1] == gpus][0] for gpus in (768, 3584))
    many = model.predict(model.resnet50(256), 4096, model.BEST)
    ddp, half, fsdp = model.STATE.values()
    limit = model.FRACTION / ddp
    page = " ".join("".join(page.read_text(encoding="utf-8") for page in PAGES).split())
    for words in (
        f"hardly anything: {model.efficiency(model.resnet50(256), 8, model.BEST):.0%}",
        f"DDP adds {model.FITTED.ddp * 1e3:.1f} ms",
        f"at 32, {eager.seconds / graphs.seconds:.1f} times as fast as eager",
        f"for {most[1] * most[4] / some[1] / some[4]:.1f} times the GPU hours",
        f"One step sends {model.TRANSFORMER * 4 / 1e9:.1f} GB",
        f"every {round(model.GPU_HOURS_TO_FAILURE, -2):,.0f} GPU hours",
        f"makes it {many.waiting / many.alone:.0%} of a step",
        f"needs {ddp} bytes per parameter at O1 and {half} at O2 on each GPU, and with FSDP {fsdp}",
        f"From about {141 * limit:.1f} billion parameters on GPUs of 141 GB, and {80 * limit:g}",
    ):
        assert words in page, words


@pytest.mark.parametrize(
    ("state", "level", "ddp"),
    [("DDP, O1", "O1", "apex"), ("DDP, O2", "O2", "apex"), ("FSDP", "O4", "fsdp")],
)
def test_bytes_per_parameter_are_those_of_check(state, level, ddp):
    args = Namespace(opt_level=level, ema=0.0, accumulate=1, cuda_graphs=False)
    assert model.STATE[state] == persistent_bytes(args, ddp)


def test_the_page_names_flags_that_exist():
    project = ROOT / "{{cookiecutter.project_slug}}"
    program = (BENCHMARKS / "scaling_model.py").read_text(encoding="utf-8")
    sources = (project / "main.py", project / "task.py", project / "engine" / "flags.py")
    known = program + "".join(path.read_text(encoding="utf-8") for path in sources)
    flags = set(re.findall(r"(?<=[`\s])--[a-z][a-z-]+", PAGE.read_text(encoding="utf-8")))
    assert len(flags) > 10
    assert {flag for flag in flags if f'"{flag}"' not in known} == set()


def test_it_writes_the_page_and_small_pictures(tmp_path, monkeypatch):
    for page in PAGES:
        stale = re.sub(r"(?<=\| )\d+%(?= \|)", "0%", page.read_text(encoding="utf-8"))
        (tmp_path / page.name).write_text(stale, encoding="utf-8")
    monkeypatch.setattr(model, "DOCS", tmp_path)
    monkeypatch.setattr(model, "BENCHMARKS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["scaling_model.py", "--write"])
    assert model.main() == 0
    for page in PAGES:
        assert (tmp_path / page.name).read_text(encoding="utf-8") == page.read_text(
            encoding="utf-8"
        )
    assert model.resnet50_table() in PAGE.read_text(encoding="utf-8")
    shown = set(re.findall(r"\((\w+\.png)\)", PAGE.read_text(encoding="utf-8")))
    assert shown == {picture.name for picture in tmp_path.glob("*.png")}
    for picture in (*tmp_path.glob("*.png"), *PAGE.parent.glob("scaling_*.png")):
        assert picture.stat().st_size < 120_000
        assert picture.name in shown


def predicted(*flags):
    """Of a job of one's own."""
    return subprocess.run(
        [sys.executable, BENCHMARKS / "scaling_model.py", *flags],
        env=SCREENED,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
def test_a_job_of_ones_own():
    job = ("--step-ms", "100", "--parameters", "1e9", "--nics", "1", "--gbits", "25")
    slow, halved = predicted(*job), predicted(*job, "--gradient-bytes", "2")
    late = predicted(*job, "--loader-ms", "500")
    rows = [
        [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
        for done in (slow, halved, late)
    ]
    assert rows[0][0] == ["1", "100.0", "0.0", "0.0", "100%"]
    assert rows[2][0][1] == "500.0"
    for full, half in zip(rows[0][4:], rows[1][4:], strict=True):
        assert float(half[3]) == pytest.approx(float(full[3]) / 2, rel=0.2)
    assert all(float(a[1]) <= float(b[1]) for a, b in pairwise(rows[0]))


@pytest.mark.parametrize("wrong", [("--step-ms", "0"), ("--gbits", "inf"), ("--nics", "two")])
def test_a_number_that_can_not_be_is_refused(wrong):
    done = predicted("--step-ms", "100", *wrong)
    assert done.returncode == 2
    assert wrong[0] in done.stderr.splitlines()[-1]
