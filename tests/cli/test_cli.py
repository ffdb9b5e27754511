#!/usr/bin/env python3
"""Black-box test of the command `torchium`: python3 tests/cli/test_cli.py PATH-TO-TORCHIUM.

Only the standard library is used. Every test runs the command and checks its exit status, output and messages. The
device is TORCHIUM_TEST_DEVICE, by default the CPU; if it is unusable, all tests are skipped.
"""

import json
import os
import pty
import re
import select
import subprocess
import sys
import unittest
from pathlib import Path

COMMAND = None
DEVICE = os.environ.get("TORCHIUM_TEST_DEVICE", "cpu")
SKIPPED = 77  # ctest's status of a skipped test
PLAIN = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "TERM")}
# Under AddressSanitizer, failed allocations must return NULL as elsewhere.
PLAIN["ASAN_OPTIONS"] = PLAIN.get("ASAN_OPTIONS", "") + ":allocator_may_return_null=1"


def run(*arguments, env=None, stdout=subprocess.PIPE):
    """Runs the command without a terminal and returns (status, output, messages)."""
    result = subprocess.run([COMMAND, *arguments], stdout=stdout, stderr=subprocess.PIPE, env=env or PLAIN, timeout=300)
    output = result.stdout.decode() if result.stdout is not None else ""
    return result.returncode, output, result.stderr.decode()


def run_on_terminal(*arguments, env):
    """Runs the command with output and messages on one pseudo-terminal and returns (status, text)."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen([COMMAND, *arguments], stdout=theirs, stderr=theirs, stdin=theirs, env=env)
    os.close(theirs)
    text = b""
    while True:
        ready, _, _ = select.select([ours], [], [], 300)
        if not ready:
            process.kill()
            raise AssertionError("no output for 300 s")
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux's error after the other end is closed
            break
        if not chunk:
            break
        text += chunk
    os.close(ours)
    return process.wait(), text.decode()


class Usage(unittest.TestCase):
    def test_version(self):
        status, output, messages = run("--version")
        self.assertEqual((status, messages), (0, ""))
        self.assertRegex(output, r"^torchium \d+\.\d+\.\d+\n$")

    def test_help_on_every_level(self):
        status, general, _ = run("--help")
        self.assertEqual(status, 0)
        self.assertEqual(run("help")[1], general)
        for command in ("info", "bench"):
            self.assertIn(command, general)
            status, output, messages = run(command, "--help")
            self.assertEqual((status, messages), (0, ""))
            self.assertIn(f"usage: torchium {command}", output)
            self.assertEqual(run("help", command)[1], output)

    def assert_usage(self, arguments, *wanted):
        status, output, messages = run(*arguments)
        self.assertEqual((status, output), (2, ""), arguments)
        for text in wanted:
            self.assertIn(text, messages, arguments)
        self.assertIn("--help", messages, arguments)

    def test_wrong_usage_says_what_to_type(self):
        self.assert_usage([], "command is missing")
        self.assert_usage(["inof"], "did you mean 'torchium info'")
        self.assert_usage(["--verison"], "did you mean 'torchium --version'")
        self.assert_usage(["xyzzy"], "unknown command 'xyzzy'")
        self.assert_usage(["help", "xyzzy"], "unknown command 'xyzzy'")
        self.assert_usage(["info", "--jsno"], "did you mean '--json'")
        self.assert_usage(["info", "extra"], "unexpected argument 'extra'")
        self.assert_usage(["info", "--json=yes"], "takes no value")
        self.assert_usage(["bench", "--only"], "--only needs a value")
        self.assert_usage(["bench", "--only", "no-such-case"], "--list")

    def test_numbers_are_read_strictly(self):
        for text in ("25O", "-5", "0", "", " 7", "7 ", "0x10", "1e3", "1.5", "99999999999999999999", "nan"):
            self.assert_usage(["train", "--samples", text], "--samples must be an integer")
            self.assert_usage(["train", f"--samples={text}"], "--samples must be an integer")
        for text in ("1e6x", "inf", "nan", "", "0", "-1e6", "1e400", "0x1p4"):
            self.assert_usage(["bench", "--seconds", text], "--seconds must be a number")

    def test_a_number_too_large_is_told_what_is_allowed(self):
        """The message has the value and both ends of the range, not only the violated one."""
        for option, least, most in (("--samples", 2, 10**7), ("--batch", 1, 10**7), ("--seed", 0, 9 * 10**18)):
            for text in ("99999999999999999999", "9223372036854775807", "-1", "-99999999999999999999"):
                wanted = f"{option} must be an integer from {least} to {most}, not '{text}'"
                self.assert_usage(["train", option, text], wanted)
        self.assert_usage(["bench", "--seconds", "1e9"], "from 0.001 to 600, not '1e9'")

    def test_nothing_said_is_obeyed_by_a_terminal(self):
        hostile = b"\x1b[31mred\x07\xc2\x9b2J\xff\xe2\x80\xaetxt"
        shown = "\\x1b[31mred\\x07\\x9b2J\\xff\\u202etxt"
        for arguments in (
            [hostile],
            ["help", hostile],
            ["info", b"--" + hostile],
            ["train", "--samples", hostile],
            ["bench", "--device", hostile],
            ["bench", "--only", hostile],
        ):
            _, output, messages = run(*arguments)
            self.assertEqual(output, "", arguments)
            self.assertIn(shown, messages, arguments)
        env = {os.fsencode(key): os.fsencode(value) for key, value in PLAIN.items()}
        env[b"TORCHIUM_CUDA_PATH"] = hostile
        for arguments in (["info"], ["info", "--json"]):
            status, output, _ = run(*arguments, env=env)
            self.assertEqual(status, 0)
            for control in ("\x1b", "\x07", "\x9b"):
                self.assertNotIn(control, output, arguments)
        self.assertIn(shown, run("info", env=env)[1])

    def test_long_words_are_cut(self):
        status, output, messages = run("x" * 100000)
        self.assertEqual((status, output), (2, ""))
        self.assertLess(len(messages), 10000)
        self.assertIn("xxx...", messages)

    def test_closed_streams(self):
        """A closed stdout is a write error; no file may take its descriptor."""
        for closed in ((1,), (0, 1), (0, 1, 2)):
            process = subprocess.Popen(
                [COMMAND, "info"],
                stderr=subprocess.PIPE,
                env=PLAIN,
                preexec_fn=lambda closed=closed: [os.close(number) for number in closed],
            )
            messages = process.communicate(timeout=300)[1].decode()
            self.assertEqual(process.returncode, 1, closed)
            if 2 not in closed:
                self.assertIn("could not be written", messages)

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs /dev/full")
    def test_a_full_disk_is_a_failure(self):
        for arguments in (["--version"], ["--help"], ["info"], ["info", "--json"], ["bench", "--list"]):
            with open("/dev/full", "wb") as full:
                status, _, messages = run(*arguments, stdout=full)
            self.assertEqual(status, 1, arguments)
            self.assertIn("could not be written", messages)


class Info(unittest.TestCase):
    def test_text(self):
        status, output, messages = run("info")
        self.assertEqual((status, messages), (0, ""))
        for text in ("Torchium ", "built with", "threads", "Backend cpu: available", "memory", "Backend cuda"):
            self.assertIn(text, output)
        self.assertNotIn("\033", output)
        self.assertNotIn("\r", output)

    def test_json_is_one_complete_document(self):
        status, output, messages = run("info", "--json")
        self.assertEqual((status, messages), (0, ""))
        info = json.loads(output)
        backends = {backend["name"]: backend for backend in info["backends"]}
        self.assertTrue(backends["cpu"]["available"])
        device = backends["cpu"]["devices"][0]
        self.assertGreater(device["memory"]["total"], 0)
        self.assertGreaterEqual(info["threads"], 1)
        for backend in info["backends"]:
            if not backend["available"]:
                self.assertTrue(backend["reason"])
                self.assertEqual(backend["devices"], [])

    def test_info_kernels_prints_the_table_of_the_docs(self):
        status, output, messages = run("info", "--kernels")
        self.assertEqual((status, messages), (0, ""))
        page = Path(__file__).parents[2] / "docs" / "architecture.md"
        self.assertIn(f"```text\n{output}```\n", page.read_text())

    def test_variables_that_are_set_are_shown(self):
        env = dict(PLAIN, TORCHIUM_CUDA_PATH="/no/toolkit", TORCHIUM_CUBLAS="/no/libcublas.so", TORCHIUM_CPU="plain")
        text = run("info", env=env)[1]
        environment = json.loads(run("info", "--json", env=env)[1])["environment"]
        for name in ("TORCHIUM_CUDA_PATH", "TORCHIUM_CUBLAS", "TORCHIUM_CPU"):
            self.assertRegex(text, rf"set +{name}={env[name]}\n")
            self.assertEqual(environment[name], env[name])

    def test_json_is_valid_whatever_the_environment_holds(self):
        env = {os.fsencode(key): os.fsencode(value) for key, value in PLAIN.items()}
        env[b"TORCHIUM_BACKEND_PATH"] = b'/no "where"\\\n\t\xff\xe2\x82\xac\xed\xa0\x80'
        status, output, _ = run("info", "--json", env=env)
        self.assertEqual(status, 0)
        value = json.loads(output)["environment"]["TORCHIUM_BACKEND_PATH"]
        self.assertTrue(value.startswith('/no "where"\\\n\t\ufffd\u20ac'))

    def test_color_only_on_a_terminal_that_wants_it(self):
        status, text = run_on_terminal("info", env=dict(PLAIN, TERM="xterm"))
        self.assertEqual(status, 0)
        self.assertIn("\033[1m", text)
        for env in (dict(PLAIN, TERM="xterm", NO_COLOR="1"), dict(PLAIN, TERM="dumb"), PLAIN):
            self.assertNotIn("\033", run_on_terminal("info", env=env)[1])


def bench(*arguments):
    return run("bench", "--seconds", "0.001", "--device", DEVICE, *arguments)


class Bench(unittest.TestCase):
    def test_list_and_only(self):
        names = run("bench", "--list")[1].split()
        quick = run("bench", "--list", "--quick")[1].split()
        self.assertTrue(set(quick) < set(names))
        self.assertEqual(len(names), len(set(names)))
        operations = """
            matmul eigh matrix_power inverse_root/newton inverse_root/rational gram symmetric_product
            orthogonalize kronecker_product/64-kron-128 kronecker_matmul kronecker_solve
            nearest_kronecker sample_gradients sample_norms weighted_sum kfac_factors matmul_chunked
        """
        for operation in operations.split():
            self.assertTrue(any(name.startswith(operation) for name in names), operation)
        # A GPU also gets large sizes; their names are known without one.
        here = run("bench", "--list", "--device", "cpu")[1].split()
        there = run("bench", "--list", "--device", "cuda")[1].split()
        self.assertTrue(set(here) < set(there))
        self.assertIn("inverse_root/auto/4x2048/float32/1e-06", set(there) - set(here))
        only = run("bench", "--list", "--only", "eigh/")[1].split()
        self.assertEqual(only, [name for name in names if "eigh/" in name])

    def test_every_row_is_timed_and_text_is_plain_and_quiet(self):
        status, output, messages = bench("--quick", "--only", "/64/float32")
        self.assertEqual((status, messages), (0, ""))
        for limit in ("float32", "float64", "bfloat16"):
            self.assertRegex(output, rf"product {limit} +\d*[1-9]")
        for text in ("matmul: A B, float32\n", "inverse_root: A^(-1/4), float32, damping 1e-06", "of limit"):
            self.assertIn(text, output)
        self.assertNotIn("\r", output)
        self.assertNotIn("\033", output)
        rows = [line.split() for line in output.splitlines() if re.match(r"  64 ", line)]
        roots = [row for row in rows if row[1].rstrip(":") in ("auto", "eigen", "newton", "rational")]
        self.assertEqual((len(rows), len(roots)), (4 + 2 * 4, 2 * 4))
        for row in rows:
            if row[-2:] == ["not", "offered"]:
                self.assertNotEqual(DEVICE, "cpu")
                continue
            median, least = (float(word) for word in [word for word in row[1:] if word[0].isdigit()][:2])
            self.assertTrue(median >= least > 0.0, row)
            if row in roots:
                self.assertLess(float(row[-1]), 1e-2, row)

    def test_an_absent_device_is_explained(self):
        for device in ("tpu", "cuda:4711"):
            status, output, messages = run("bench", "--device", device)
            self.assertEqual((status, output), (1, ""))
            self.assertTrue(messages.startswith("torchium bench: "), messages)

    def test_progress_on_a_terminal(self):
        arguments = ["--quick", "--seconds", "0.001", "--only", "matmul/64/", "--device", DEVICE]
        status, text = run_on_terminal("bench", *arguments, env=dict(PLAIN, TERM="xterm"))
        self.assertEqual(status, 0)
        self.assertRegex(text, r"\r *\d+ %")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("usage: test_cli.py PATH-TO-TORCHIUM [unittest options]")
    COMMAND = os.path.abspath(sys.argv.pop(1))
    if "TORCHIUM_TEST_REQUIRE_DEVICE" not in os.environ:
        status, _, messages = bench("--quick", "--only", "matmul/64/")
        if status != 0 and DEVICE != "cpu":
            print(f"skipped: {messages}")
            sys.exit(SKIPPED)
    unittest.main()
