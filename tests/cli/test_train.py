#!/usr/bin/env python3
"""Black-box test of `torchium train`: python3 tests/cli/test_train.py PATH-TO-TORCHIUM.

Only the standard library is used. Data sets are generated from a seed; checkpoints are parsed by their format, without
the library. The device is TORCHIUM_TEST_DEVICE, by default the CPU; if it is unusable, all tests are skipped.
"""

import itertools
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest
import xml.dom.minidom

import test_cli
from test_cli import DEVICE, PLAIN, SKIPPED, run_on_terminal

SMALL = ["--samples", "500", "--hidden", "24,16", "--batch", "32", "--device", DEVICE]
LONG = ["--schedule", "constant", "--steps", "1000000", "--log-every", "5"]
COLORS = ("red", "green", "blue")
ALL = "shampoo,kl_shampoo,soap,muon,normuon,kfac,ekfac,natural,adamw,lion,sgd"


def run(*arguments, **keywords):
    return test_cli.run("train", *arguments, **keywords)


def lines(output):
    return [json.loads(line) for line in output.splitlines()]


def read_checkpoint(path):
    """(settings, {name: (dtype, shape, bytes)}) of a safetensors file."""
    with open(path, "rb") as file:
        content = file.read()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    settings = header.pop("__metadata__")
    tensors = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        tensors[name] = (entry["dtype"], entry["shape"], content[8 + length + first : 8 + length + last])
    return settings, tensors


def checkpoint_of(header, content=b""):
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + content


def weights_of(path, method):
    """All weights of a method's network in a checkpoint."""
    numbers = []
    for name, (_, _, content) in sorted(read_checkpoint(path)[1].items()):
        if name.startswith(f"{method}/network/"):
            numbers += struct.unpack(f"<{len(content) // 4}f", content)
    return numbers


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def path(self, name):
        return os.path.join(self.folder.name, name)

    def write(self, name, content):
        with open(self.path(name), "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())
        return self.path(name)

    def train(self, *arguments, env=None):
        """A successful run's lines, parsed as objects."""
        status, output, messages = run(*arguments, "--json", env=env)
        self.assertEqual((status, messages), (0, ""), arguments)
        return lines(output)

    def assert_refused(self, wanted_status, arguments, *wanted):
        status, output, messages = run(*arguments)
        self.assertEqual((status, output), (wanted_status, ""), (arguments, messages))
        self.assertTrue(messages.startswith("torchium train: "), messages)
        for text in wanted:
            self.assertIn(text, messages, arguments)

    def start(self, *arguments, preexec_fn=None):
        """A concurrent run, unbuffered: communicate() would skip what readline() has buffered."""
        command = [test_cli.COMMAND, "train", *SMALL, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
        process = subprocess.Popen(command, **pipes, env=PLAIN, preexec_fn=preexec_fn)
        self.addCleanup(process.kill)
        return process

    def end(self, process):
        output, messages = process.communicate(timeout=300)
        return process.returncode, output.decode(), messages.decode()

    def stop(self, process, number):
        for _ in range(4):  # it has started
            process.stdout.readline()
        process.send_signal(number)
        return self.end(process)


def blobs(rows, classes, columns, seed):
    """Rows (features, label) around one center per class."""
    source = random.Random(seed)
    centers = [[source.gauss(0, 3) for _ in range(columns)] for _ in range(classes)]
    result = []
    for i in range(rows):
        label = i % classes
        result.append(([value + source.gauss(0, 0.5) for value in centers[label]], label))
    return result


def csv_of(rows, names=None):
    """Lines of comma-separated values, with the class names after a header."""
    text = "" if names is None else "a,b,c,d,kind\n"
    for features, label in rows:
        text += ",".join(f"{value:.6f}" for value in features) + f",{label if names is None else names[label]}\n"
    return text


class Training(Case):
    def test_every_optimizer_learns_the_digits(self):
        data = self.train(*SMALL, "--steps", "60", "--optimizer", ALL, "--lr", "sgd=0.1")
        *points, summary = data
        self.assertEqual([run["optimizer"] for run in summary["runs"]], ALL.split(","))
        for result in summary["runs"]:
            own = [point for point in points if point["optimizer"] == result["optimizer"]]
            self.assertEqual([point["step"] for point in own], sorted({point["step"] for point in own}))
            self.assertEqual((own[0]["step"], own[-1]["step"], result["steps"]), (0, 60, 60))
            self.assertEqual(own[-1]["train_loss"], result["train_loss"])
            self.assertLess(result["train_loss"], 0.5 * own[0]["train_loss"], result)
            self.assertGreater(result["test_accuracy"], 0.4, result)
            self.assertEqual((result["skipped"], result["failed"], result["diverged"]), (0, 0, False))
        self.assertEqual(len({point["train_loss"] for point in points if point["step"] == 0}), 1)
        self.assertEqual(summary["baseline"], "adamw")

    def test_a_run_does_not_depend_on_the_others(self):
        alone = self.train(*SMALL, "--steps", "20", "--optimizer", "soap")
        among = self.train(*SMALL, "--steps", "20", "--optimizer", "adamw,soap")
        wanted = [point["train_loss"] for point in alone if point.get("optimizer") == "soap"]
        self.assertEqual(wanted, [point["train_loss"] for point in among if point.get("optimizer") == "soap"])

    def test_the_seed_decides_everything(self):
        def losses(seed):
            points = self.train(*SMALL, "--steps", "10", "--optimizer", "adamw", "--seed", seed)[:-1]
            return [point["train_loss"] for point in points]

        self.assertEqual(losses("3"), losses("3"))
        self.assertNotEqual(losses("3"), losses("4"))

    def test_epochs(self):
        summary = self.train(*SMALL, "--epochs", "3", "--optimizer", "sgd")[-1]
        self.assertEqual(summary["runs"][0]["steps"], 3 * (400 // 32))
        summary = self.train(*SMALL[:-4], "--batch", "4000", "--epochs", "2", "--optimizer", "sgd")[-1]
        self.assertEqual(summary["runs"][0]["steps"], 2)
        self.assertEqual(summary["settings"]["batch"], "400")

    def test_schedule_and_warmup(self):
        schedule = ["--schedule", "cosine", "--warmup", "4", "--lr", "0.1", "--log-every", "1"]
        points = self.train(*SMALL, "--steps", "20", "--optimizer", "sgd", *schedule)[:-1]
        rates = [point["lr"] for point in points]
        self.assertAlmostEqual(rates[0], 0.025)
        self.assertEqual(rates[3:], sorted(rates[3:], reverse=True))
        self.assertAlmostEqual(rates[10], 0.05, places=6)
        self.assertAlmostEqual(rates[20], 0.0, places=6)

    def test_rates_by_name(self):
        rates = ["--lr", "0.5,adamw=0.002"]
        summary = self.train(*SMALL, "--steps", "2", "--optimizer", "sgd,adamw", *rates)[-1]
        self.assertEqual([run["lr"] for run in summary["runs"]], [0.5, 0.002])

    def test_a_linear_model(self):
        summary = self.train(*SMALL[:2], "--hidden", "none", "--steps", "5", "--device", DEVICE)[-1]
        self.assertEqual(summary["parameters"], 400 * 10 + 10)

    def test_divergence_is_said_and_the_others_go_on(self):
        arguments = [*SMALL, "--steps", "30", "--optimizer", "sgd,adamw", "--lr", "sgd=1e6", "--activation", "none"]
        status, output, messages = run(*arguments)
        self.assertEqual((status, messages), (0, ""))
        summary = self.train(*arguments)[-1]
        diverged, good = summary["runs"]
        if diverged["diverged"]:
            self.assertIn("diverged", output)
            self.assertIsNone(diverged["train_loss"])
            self.assertNotIn("L = ", run(*arguments, "--optimizer", "sgd")[1])
        self.assertEqual((good["steps"], good["diverged"]), (30, False))

    def test_text_without_a_terminal_is_short_and_plain(self):
        status, output, messages = run(*SMALL, "--steps", "100", "--optimizer", "sgd")
        self.assertEqual((status, messages), (0, ""))
        self.assertNotIn("\r", output)
        self.assertNotIn("\033", output)
        self.assertEqual(sum(line.startswith("sgd ") for line in output.splitlines()), 10)
        for heading in ("optimizer", "train loss", "test loss", "accuracy", "a step", "steps to L", "time to L"):
            self.assertIn(heading, output)

    def test_progress_on_a_terminal(self):
        arguments = [*SMALL, "--steps", "300", "--optimizer", "shampoo"]
        status, text = run_on_terminal("train", *arguments, env=dict(PLAIN, TERM="xterm"))
        self.assertEqual(status, 0)
        self.assertRegex(text, r"\r.*\d+ %.*steps/s")
        self.assertNotIn("step 30 of", text)

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs /dev/full")
    def test_a_full_disk_is_a_failure(self):
        link = self.path("full.svg")
        os.symlink("/dev/full", link)
        status, _, messages = run(*SMALL, "--steps", "2", "--plot", link)
        self.assertEqual(status, 1)
        self.assertIn("No space left on device", messages)
        self.assertTrue(os.path.exists("/dev/full"))


class Autoencoder(Case):
    TASK = ("--task", "autoencode", "--samples", "500", "--hidden", "24,6,24", "--batch", "50", "--device", DEVICE)
    ALL = "shampoo,kl_shampoo,soap,muon,normuon,adamw,lion,sgd"

    def test_every_optimizer_reproduces_the_digits(self):
        *points, summary = self.train(*self.TASK, "--steps", "60", "--warmup", "0", "--optimizer", self.ALL)
        sizes = (400 * 24 + 24) + (24 * 6 + 6) + (6 * 24 + 24) + (24 * 400 + 400)
        self.assertEqual((summary["parameters"], summary["settings"]["activation"]), (sizes, "tanh"))
        for result in summary["runs"]:
            own = [point for point in points if point["optimizer"] == result["optimizer"]]
            self.assertAlmostEqual(own[0]["train_loss"], 1.0, delta=0.3)  # the variance of the pixels
            self.assertLess(result["train_loss"], 0.8 * own[0]["train_loss"], result)
            self.assertEqual((result["test_accuracy"], own[-1]["test_accuracy"]), (None, None))

    def test_the_table_has_no_accuracy(self):
        status, output, messages = run(*self.TASK, "--steps", "20", "--optimizer", "muon")
        self.assertEqual((status, messages), (0, ""))
        self.assertIn("Training an autoencoder 400-24-6-24-400 (tanh)", output)
        self.assertIn("steps to L", output)
        for word in ("accuracy", "nan"):
            self.assertNotIn(word, output)

    def test_a_resumed_run_keeps_the_task(self):
        path, common = self.path("some"), (*self.TASK, "--schedule", "constant", "--optimizer", "soap")
        self.train(*common, "--steps", "9", "--checkpoint", path)
        again = self.train("--resume", path, "--steps", "20", "--device", DEVICE)[-1]["runs"][0]
        whole = self.train(*common, "--steps", "20")[-1]["runs"][0]
        self.assertEqual((again["train_loss"], again["test_loss"]), (whole["train_loss"], whole["test_loss"]))


class Convergence(Case):
    def test_curvature_pays(self):
        """Steps to AdamW's final loss, at the default rates; docs/training.md has larger runs."""
        *_, summary = self.train("--task", "autoencode", "--samples", "2000", "--steps", "150", "--device", DEVICE,
                                 "--threads", "1", "--optimizer", "shampoo,kl_shampoo,soap,muon,adamw")  # fmt: skip
        for result in summary["runs"][:4]:
            self.assertLessEqual(result["baseline_steps"], 75, result)


class Curvature(Case):
    """KFAC, the natural gradient, and per-sample gradients."""

    def test_statistics_are_those_of_kfac(self):
        steps = ["--steps", "9", "--precondition-frequency", "5"]
        kfac, sgd = self.train(*SMALL, *steps, "--optimizer", "kfac,sgd")[-1]["runs"]
        self.assertEqual((kfac["refreshes"], kfac["failed"]), (6 * 3, 0))  # at steps 0 to 5, for three layers
        widths = [400, 24, 16, 10]
        factors = sum((a + 1) ** 2 + b**2 for a, b in itertools.pairwise(widths))
        self.assertGreaterEqual(kfac["state_bytes"] - sgd["state_bytes"], 2 * 4 * factors)

    def last_loss(self, *arguments):
        return self.train(*SMALL, "--steps", "3", *arguments)[-1]["runs"][0]["train_loss"]

    def test_options_count(self):
        for method, options in (
            ("kfac", (["--damping", "1"], ["--kl-clip", "1e-6"], ["--fisher", "empirical"])),
            ("ekfac", (["--damping", "1"], ["--kl-clip", "1e-6"], ["--fisher", "empirical"])),
            ("natural", (["--damping", "3"],)),
        ):
            plain = self.last_loss("--optimizer", method)
            for option in options:
                self.assertNotEqual(self.last_loss("--optimizer", method, *option), plain, (method, option))
        self.assertEqual(
            self.last_loss("--optimizer", "kfac", "--fisher", "sampled"), self.last_loss("--optimizer", "kfac")
        )

    def test_a_clip_beyond_all_norms_changes_rounding_alone(self):
        common = [*SMALL, "--steps", "3", "--optimizer", ALL]
        plain, wide = (self.train(*common, *clip)[-1]["runs"] for clip in ([], ["--per-sample-clip", "1e9"]))
        for a, b in zip(wide, plain, strict=True):
            self.assertAlmostEqual(a["train_loss"] / b["train_loss"], 1.0, delta=1e-3, msg=a["optimizer"])

    def test_per_sample_clip_bounds_the_step(self):
        """One row in fifty is a thousand times larger: without clipping it dominates the step."""
        rows = [
            ([value * (1000.0 if i % 50 == 7 else 1.0) for value in features], label)
            for i, (features, label) in enumerate(blobs(200, 3, 4, seed=5))
        ]
        path, rate, bound = self.write("outliers.csv", csv_of(rows, COLORS)), 0.5, 0.01
        common = ["--data", path, "--hidden", "8", "--steps", "1", "--optimizer", "sgd", "--device", DEVICE]
        common += ["--batch", "200"]

        def change(*arguments):
            before, after = self.path("before"), self.path("after")
            self.train(*common, *arguments, "--lr", "0", "--checkpoint", before)
            self.train(*common, *arguments, "--lr", str(rate), "--checkpoint", after)
            pairs = zip(weights_of(before, "sgd"), weights_of(after, "sgd"), strict=True)
            return sum((b - a) ** 2 for a, b in pairs) ** 0.5

        self.assertGreater(change(), 10 * rate * bound)
        # A mean of vectors of at most the bound's length; rounding of the weights comes on top.
        self.assertLessEqual(change("--per-sample-clip", str(bound)), rate * bound + 1e-5)
        self.assertGreater(change("--per-sample-clip", str(bound)), 0.0)


class Data(Case):
    def test_csv(self):
        path = self.write("blobs.csv", csv_of(blobs(300, 3, 4, seed=1), COLORS))
        summary = self.train("--data", path, "--steps", "60", "--optimizer", "adamw", "--device", DEVICE)[-1]
        self.assertEqual((summary["columns"], summary["classes"]), (4, 3))
        self.assertEqual((summary["train_rows"], summary["test_rows"]), (240, 60))
        self.assertGreater(summary["runs"][0]["test_accuracy"], 0.9)
        self.assert_refused(1, ["--data", self.write("one.csv", "a,k\n1,x\n2,x\n3,x\n")], "same label")

    @unittest.skipUnless(os.path.exists("/dev/stdin"), "needs /dev/stdin")
    def test_standard_input_is_read_where_it_is_a_file(self):
        path = self.write("rows.csv", csv_of(blobs(40, 2, 3, seed=8)))
        arguments = [test_cli.COMMAND, "train", "--data", "/dev/stdin", "--steps", "2", "--json", "--device", DEVICE]
        with open(path, "rb") as file:
            result = subprocess.run(arguments, stdin=file, capture_output=True, env=PLAIN, timeout=300)
        self.assertEqual((result.returncode, result.stderr), (0, b""))
        result = subprocess.run(arguments, input=b"a,b\n1,2\n", capture_output=True, env=PLAIN, timeout=300)
        self.assertEqual(result.returncode, 1)
        self.assertIn(b"not a regular file but a pipe", result.stderr)

    def test_memory_is_bounded_by_the_size_of_the_file(self):
        """A line of four million cells, with one or two gigabytes of memory: a bug once allocated sixteen, for rows
        that never came."""
        if "sanitizer" in json.loads(test_cli.run("info", "--json")[1])["compiler"]:
            self.skipTest("a sanitizer reserves more than that for itself")
        path = self.write("wide.csv", (1 << 22) * ",")
        most = 3 << 30
        result = subprocess.run(
            [test_cli.COMMAND, "train", "--data", path, "--device", "cpu"],
            capture_output=True,
            env=dict(PLAIN, OMP_NUM_THREADS="2"),
            timeout=300,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (most, most)),
        )
        self.assertEqual(result.returncode, 1)
        self.assertIn(b"the cell is empty", result.stderr)

    def test_nothing_that_files_hold_is_obeyed_by_a_terminal(self):
        hostile, shown = "\x1b[31mred\x07\x9b2J\u202e", "\\x1b[31mred\\x07\\x9b2J\\u202e"
        rows = f"a,{hostile},k\n1,2,x\n"
        self.assert_refused(
            1, ["--data", self.write("cell.csv", rows + f"1,{hostile},y\n")], f"({shown})", f"'{shown}'"
        )
        path = self.write(hostile + ".csv", csv_of(blobs(40, 2, 3, seed=9)))
        self.assert_refused(1, ["--data", path, "--label", hostile], shown + ".csv", f"'{shown}'")
        checkpoint, plot = self.path(hostile), self.path(hostile + ".svg")
        written = ["--checkpoint", checkpoint, "--plot", plot]
        status, output, messages = run("--data", path, "--steps", "2", "--device", DEVICE, *written)
        self.assertEqual((status, messages), (0, ""))
        self.assertIn(f"{shown}.csv:", output)
        self.assertIn(f"{shown}.svg\n", output)
        json_output = run("--data", path, "--steps", "2", "--device", DEVICE, "--json", *written)[1]
        self.assertEqual(lines(json_output)[-1]["data"], path)
        for text in (output, json_output):
            for control in ("\x1b", "\x07", "\x9b"):
                self.assertNotIn(control, text)

    def test_settings_of_a_checkpoint_are_not_obeyed_either(self):
        for key, value in (("format", "\x1b[2J"), ("hidden", "\x1b[2J"), ("data", "/\x1b[2J"), ("seed", "\x1b[2J")):
            settings = {"train.format": "1", f"train.{key}": value}
            path = self.write(f"hostile-{key}", checkpoint_of({"__metadata__": settings}))
            status, output, messages = run("--resume", path)
            self.assertIn((status, output), ((1, ""), (2, "")), key)
            self.assertIn("\\x1b[2J", messages)
            self.assertNotIn("\x1b", messages)

    def test_a_checkpoint_opens_no_file(self):
        """The data path is given again and may differ; the checkpoint's is ignored."""
        rows = self.write("rows.csv", csv_of(blobs(40, 2, 4, seed=8), COLORS))
        path, moved = self.path("some"), self.path("moved")
        common = ["--label", "kind", "--steps", "4", "--optimizer", "sgd", "--device", DEVICE]
        self.train("--data", rows, *common, "--checkpoint", path)
        os.rename(rows, moved)
        self.assert_refused(2, ["--resume", path], f"trained with --data '{rows}': give --data again")
        again = self.train("--resume", path, "--data", moved, "--label", "kind", "--device", DEVICE)
        self.assertEqual(again[-1]["runs"][0]["steps"], 4)


class Checkpoints(Case):
    ARGUMENTS = (*SMALL, "--log-every", "7", "--schedule", "constant", "--optimizer")
    FEW = (*ARGUMENTS, "soap,kfac,sgd")

    def interesting(self, path):
        """Results that are bitwise equal between runs of one plan: everything but times, and checksums of them."""
        settings, tensors = read_checkpoint(path)
        settings = {
            key: value
            for key, value in settings.items()
            if not key.endswith(".seconds") and not key.startswith("torchium.crc32c")
        }
        for name in [name for name in tensors if name.endswith("/curve")]:
            _, shape, content = tensors.pop(name)
            numbers = struct.unpack(f"<{shape[0] * shape[1]}d", content)
            tensors[name] = [numbers[i : i + 1] + numbers[i + 2 : i + 5] for i in range(0, len(numbers), 5)]
        return settings, tensors

    def test_resume_is_exact(self):
        whole, part, rest = self.path("whole"), self.path("part"), self.path("rest")
        self.train(*self.ARGUMENTS, ALL, "--steps", "24", "--checkpoint", whole)
        self.train(*self.ARGUMENTS, ALL, "--steps", "11", "--checkpoint", part)
        self.train("--resume", part, "--steps", "24", "--checkpoint", rest, "--device", DEVICE)
        (settings, tensors), (wanted_settings, wanted) = self.interesting(rest), self.interesting(whole)
        self.assertEqual(settings, wanted_settings)
        self.assertEqual(set(tensors), set(wanted))
        for name in wanted:
            if not name.endswith("/curve"):
                self.assertEqual(tensors[name], wanted[name], name)
                continue
            # The shorter run also evaluated at its own end.
            self.assertEqual([row for row in tensors[name] if row[0] != 11], wanted[name], name)

    def test_a_finished_training_changes_nothing(self):
        first, second = self.path("first"), self.path("second")
        self.train(*self.FEW, "--steps", "10", "--checkpoint", first)
        self.train("--resume", first, "--checkpoint", second, "--device", DEVICE)
        self.assertEqual(read_checkpoint(first), read_checkpoint(second))

    def test_a_checkpoint_without_checksums_is_read_with_a_warning(self):
        path, old = self.path("with"), self.path("without")
        self.train(*self.FEW, "--steps", "4", "--checkpoint", path)
        with open(path, "rb") as file:
            content = file.read()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        metadata = header["__metadata__"]
        header["__metadata__"] = {k: v for k, v in metadata.items() if not k.startswith("torchium.crc32c")}
        self.assertLess(len(header["__metadata__"]), len(metadata))
        self.write("without", checkpoint_of(header, content[8 + length :]))
        status, _, messages = run("--resume", old, "--device", DEVICE, "--json")
        self.assertEqual(status, 0, messages)
        self.assertEqual(messages.count("has no checksums"), 1, messages)

    def test_what_does_not_fit_is_refused(self):
        path = self.path("some")
        self.train(*self.FEW, "--steps", "4", "--checkpoint", path, "--schedule", "cosine")
        for change, *words in (
            (["--hidden", "24"], "--hidden", "'24,16'", "'24'"),
            (["--seed", "5"], "data"),
            (["--batch", "16"], "--batch", "'32'", "'16'"),
            (["--optimizer", "adamw"], "--optimizer"),
            (["--lr", "sgd=0.5"], "--lr"),
            (["--samples", "400"], "data"),
            (["--steps", "8"], "--steps"),
            (["--weight-decay", "0.1"], "--weight-decay"),
            (["--block", "8"], "--block"),
            (["--damping", "0.5"], "--damping"),
            (["--kl-clip", "0"], "--kl-clip"),
            (["--fisher", "empirical"], "--fisher"),
            (["--per-sample-clip", "1"], "--per-sample-clip"),
        ):
            status, _, messages = run("--resume", path, "--device", DEVICE, "--json", *change)
            self.assertNotEqual(status, 0, change)
            for word in words:
                self.assertIn(word, messages, change)

    def test_bad_files(self):
        path = self.path("good")
        self.train(*SMALL, "--steps", "2", "--checkpoint", path)
        with open(path, "rb") as file:
            content = file.read()
        self.assert_refused(1, ["--resume", self.path("absent")], "absent")
        self.assert_refused(1, ["--resume", self.write("cut", content[: len(content) // 2])], "cut")
        self.assert_refused(1, ["--resume", self.write("noise", b"\xff" * 100)], "noise")
        other = checkpoint_of({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0\0\0\0")
        foreign = self.write("foreign", other)
        self.assert_refused(1, ["--resume", foreign], "foreign", "not one of 'torchium train'")
        self.assert_refused(1, [*SMALL, "--steps", "2", "--checkpoint", "/no/such/folder/x"], "/no/such/folder")

    def test_checkpoint_every_leaves_no_litter(self):
        path = self.path("often")
        self.train(*SMALL, "--steps", "9", "--checkpoint", path, "--checkpoint-every", "2", "--optimizer", "sgd")
        self.assertEqual(os.listdir(self.folder.name), ["often"])
        settings, _ = read_checkpoint(path)
        self.assertEqual(settings["train.sgd.step"], "9")


def limited(most):
    """In a child: limits file sizes to this many bytes, as on a full disk; the limit can be raised later. clang's
    OpenMP runtime needs 1024."""
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))


class Outputs(Case):
    """Files that cannot be written, from the beginning or later."""

    def test_paths_are_checked_before_anything_is_done(self):
        os.mkfifo(self.path("pipe"))
        os.mkfifo(self.path("pipe.svg"))
        os.mkdir(self.path("folder.svg"))
        os.symlink("/no/such/folder/x", self.path("astray.svg"))
        self.write("file", "")
        # The data do not exist, so reading them first would report that instead.
        for option, ending in (("--checkpoint", ""), ("--plot", ".svg")):
            for name, *wanted in (
                ("/no/such/folder/x" + ending, "folder", "No such file"),
                (self.path("file/x" + ending), "folder", "Not a directory"),
                (self.path("folder.svg"), "is a folder"),
                (self.path("pipe" + ending), "is a pipe"),
                (self.path("astray.svg"), "leads nowhere"),
                (self.path(300 * "x" + ending), "File name too long"),
                (5000 * "/x" + ending, "File name too long"),
            ):
                self.assert_refused(1, ["--data", self.path("absent"), option, name], f"{option} {name[:50]}", *wanted)
        for name in (self.path("folder.svg/"), "/"):
            self.assert_refused(1, ["--data", self.path("absent"), "--checkpoint", name], "expected the name of a file")
        if os.geteuid() != 0:
            os.mkdir(self.path("closed"), 0o555)
            path = self.path("closed/x")
            self.assert_refused(1, ["--data", self.path("absent"), "--checkpoint", path], path, "Permission denied")

    def test_no_input_is_overwritten(self):
        data = self.write("rows.svg", "a,b,k\n1,2,x\n3,4,y\n")
        os.symlink(data, self.path("link.svg"))
        os.link(data, self.path("twin.svg"))
        for name in ("rows.svg", "link.svg", "twin.svg", "./rows.svg"):
            for option in ("--checkpoint", "--plot"):
                self.assert_refused(1, ["--data", data, option, self.path(name)], f"{option} ", "the file of --data")
        both = ["--checkpoint", self.path("new.svg"), "--plot", self.path("new.svg")]
        self.assert_refused(1, both, "--plot", "the file of --checkpoint")
        path = self.path("some.svg")
        self.train(*SMALL, "--steps", "2", "--checkpoint", path)
        self.assert_refused(1, ["--resume", path, "--plot", path], "--plot", "the file of --resume")

    def test_a_full_disk_does_not_end_the_training(self):
        """Neither an intermediate save nor the last one; the table is printed, and the end reports what is missing."""
        path, plot = self.path("full"), self.path("full.svg")
        files = ["--checkpoint", path, "--checkpoint-every", "2", "--plot", plot]
        for json_lines in (False, True):
            arguments = ["--steps", "9", "--optimizer", "adamw,sgd", *files, *(["--json"] if json_lines else [])]
            process = self.start(*arguments, preexec_fn=limited(2000))
            status, output, messages = self.end(process)
            self.assertEqual(status, 1, messages)
            if json_lines:
                self.assertEqual([run["steps"] for run in lines(output)[-1]["runs"]], [9, 9])
            else:
                self.assertRegex(output, r"(?m)^  sgd +0.3 +9 ")
                self.assertNotIn("Learning curves", output)
            warning, picture, checkpoint = messages.splitlines()
            self.assertRegex(warning, "^torchium train: warning: the checkpoint could not be saved: .*File too large")
            self.assertIn(f"the picture {plot} could not be written: File too large", picture)
            self.assertEqual(
                checkpoint, f"torchium train: the checkpoint {path} is missing: it could not be saved in this run"
            )
            self.assertEqual(os.listdir(self.folder.name), [])

    def test_a_disk_that_fills_up(self):
        """The last successful checkpoint remains, and the end names it; once a later save succeeds, nothing
        is missing."""
        for cleared in (False, True):
            path = self.path(f"some{cleared}")
            files = ["--checkpoint", path, "--checkpoint-every", "3"]
            process = self.start(*LONG, *files, "--optimizer", "sgd", "--json")
            while not os.path.exists(path):
                process.stdout.readline()
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
            self.assertIn(b"could not be saved", process.stderr.readline())
            if cleared:
                resource.prlimit(process.pid, resource.RLIMIT_FSIZE, 2 * (resource.RLIM_INFINITY,))
            status, output, messages = self.stop(process, signal.SIGINT)
            step, steps = int(read_checkpoint(path)[0]["train.sgd.step"]), lines(output)[-1]["runs"][0]["steps"]
            if cleared:
                self.assertEqual((status, messages, step), (-signal.SIGINT, "", steps))
            else:
                late = f"the checkpoint {path} is not from the end of the run: it holds step {step} of sgd"
                self.assertEqual((status, messages), (1, f"torchium train: {late}\n"))
                self.assertGreater(steps, step)
            self.train("--resume", path, "--steps", str(step + 5), "--device", DEVICE)


class Stopping(Case):
    def test_ctrl_c_ends_with_checkpoint_and_table(self):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            path = self.path(f"stopped-{number}")
            process = self.start(*LONG, "--json", "--checkpoint", path, "--optimizer", "adamw,sgd")
            status, output, messages = self.stop(process, number)
            self.assertEqual((status, messages), (-number, ""))
            summary = lines(output)[-1]
            self.assertTrue(summary["interrupted"])
            steps = summary["runs"][0]["steps"]
            self.assertGreaterEqual(steps, 5)
            settings, _ = read_checkpoint(path)
            self.assertEqual(settings["train.adamw.step"], str(steps))
            self.assertEqual(settings["train.sgd.step"], "0")

    def test_the_second_signal_ends_at_once(self):
        process = self.start(*LONG, "--json", "--optimizer", "adamw")
        process.stdout.readline()
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)
            time.sleep(0.001)
        process.communicate()
        self.assertEqual(process.returncode, -signal.SIGINT)

    def test_what_is_ignored_stays_ignored(self):
        """As nohup sets for SIGHUP, and a shell without job control for SIGINT in the background."""
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            arguments = ["--steps", "400", "--log-every", "5", "--json", "--optimizer", "sgd"]
            process = self.start(*arguments, preexec_fn=lambda number=number: signal.signal(number, signal.SIG_IGN))
            status, output, messages = self.stop(process, number)
            self.assertEqual((status, messages), (0, ""))
            summary = lines(output)[-1]
            self.assertEqual((summary["interrupted"], summary["runs"][0]["steps"]), (False, 400))

    def test_the_way_to_go_on_can_be_typed(self):
        """The printed command, run by a shell, has the same path."""
        for name in ("plain", "two words", "it's", "$HOME `x`;", "\x1b[31m\n", "\u202e"):
            path = self.path(name)
            data = self.write(name + ".csv", csv_of(blobs(40, 2, 3, seed=8)))
            process = self.start(*LONG, "--optimizer", "sgd", "--checkpoint", path, "--data", data)
            status, output, messages = self.stop(process, signal.SIGINT)
            self.assertEqual((status, messages), (-signal.SIGINT, ""))
            self.assertRegex(output, r"sgd .* interrupted\n")
            self.assertIn("steps to L", output)
            command = output.splitlines()[-1].partition("To go on: torchium ")[2]
            words = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True).stdout
            wanted = ["train", "--resume", path, "--checkpoint", path, "--data", data]
            self.assertEqual(os.fsdecode(words).split("\0")[:-1], wanted)


class Pictures(Case):
    def test_svg(self):
        path = self.path("curves.svg")
        status, output, messages = run(*SMALL, "--steps", "30", "--optimizer", "shampoo,adamw", "--plot", path)
        self.assertEqual((status, messages), (0, ""))
        self.assertIn(path, output)
        document = xml.dom.minidom.parse(path)
        lines_drawn = [line for line in document.getElementsByTagName("polyline") if line.hasAttribute("stroke")]
        self.assertEqual(len(lines_drawn), 2 * (1 + 2))  # the legend's, and one in each panel
        curves = [line for line in lines_drawn if len(line.getAttribute("points").split()) > 2]
        self.assertEqual([len(line.getAttribute("points").split()) for line in curves], 4 * [31])
        for line in curves:
            for point in line.getAttribute("points").split():
                x, y = map(float, point.split(","))
                self.assertTrue(0 <= x <= 960 and 0 <= y <= 420, point)
        words = " ".join(text.firstChild.data for text in document.getElementsByTagName("text"))
        for word in ("shampoo", "adamw", "steps", "seconds", "loss"):
            self.assertIn(word, words)


class Usage(Case):
    def test_wrong_usage_says_what_to_type(self):
        for arguments, *wanted in (
            (["--optimizer", "shampo"], "did you mean 'shampoo'"),
            (["--optimizer", "tiger"], "unknown 'tiger'", "muon"),
            (["--optimizer", ""], "unknown ''"),
            (["--optimizer", "sgd,sgd"], "twice"),
            (["--lr", "fast"], "--lr must be numbers", "'fast'"),
            (["--lr", "muon=0.1"], "'muon'", "not among"),
            (["--lr", "adamw="], "'adamw='"),
            (["--hidden", ",".join(17 * ["8"])], "16"),
            (["--activation", "rel"], "did you mean 'relu'"),
            (["--task", "autoencoder"], "did you mean 'autoencode'"),
            (["--task", "autoencode", "--optimizer", "adamw,kfac"], "--optimizer kfac needs --task classify"),
            (["--schedule", "cosin"], "did you mean 'cosine'"),
            (["--steps", "5", "--epochs", "2"], "not both"),
            (["--steps", "0"], "--steps must be"),
            (["--batch", "many"], "--batch must be", "'many'"),
            (["--test-fraction", "1"], "--test-fraction must be"),
            (["--fisher", "sample"], "did you mean 'sampled'"),
            (["--label", "x"], "--data"),
            (["--checkpoint-every", "3"], "--checkpoint"),
            (["--plot", "curves.png"], "use a name that ends in .svg, not 'curves.png'"),
            (["--plot", ".svg"], "use a name that ends in .svg, not '.svg'"),
            (["--data", ""], "--data must be a file name, not ''"),
            (["--seed", "99999999999999999999"], "from 0 to 9000000000000000000, not '99999999999999999999'"),
            (["--steps", "2147483648"], "from 1 to 1000000000, not '2147483648'"),
            (["--weight-decay", "1e400"], "from 0 to 1000000, not '1e400'"),
            (["--hidden", "1e400"], "from 1 to 1000000", "'1e400'"),
            (["--samples", "500", "--epochs", "1000000000", "--batch", "1"], "--epochs must be from 1 to 2500000"),
            (["--stpes", "5"], "did you mean '--steps'"),
        ):
            self.assert_refused(2, arguments, *wanted)

    def test_absent_devices_and_sizes_that_do_not_fit(self):
        self.assert_refused(1, ["--device", "tpu"], "tpu")
        self.assert_refused(1, ["--device", "cuda:4711"])
        status, _, messages = run("--samples", "10", "--hidden", "1000000,1000000", "--device", DEVICE, "--json")
        self.assertEqual(status, 1)
        self.assertRegex(messages, r"(?m)^torchium train: .*memory")

    def test_help(self):
        status, output, messages = run("--help")
        self.assertEqual((status, messages), (0, ""))
        for option in ("--data", "--optimizer", "--resume", "--plot", "--kl-clip", "--per-sample-clip"):
            self.assertIn(option, output)
        self.assertLessEqual(max(map(len, output.splitlines())), 120)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: test_train.py PATH-TO-TORCHIUM [unittest options]")
    test_cli.COMMAND = os.path.abspath(sys.argv.pop(1))
    if "TORCHIUM_TEST_REQUIRE_DEVICE" not in os.environ:
        status, _, messages = run("--samples", "10", "--steps", "1", "--device", DEVICE)
        if status != 0 and DEVICE != "cpu":
            print(f"skipped: {messages}")
            sys.exit(SKIPPED)
    unittest.main()
