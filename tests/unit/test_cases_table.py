"""The table of reported faults: complete, in step with the tests, and able to notice that it isn't."""

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/cases_table.py"


def load():
    spec = importlib.util.spec_from_file_location("cases_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_case_has_a_test_and_the_table_is_fresh():
    assert len(load().cases()) == 67
    done = subprocess.run([sys.executable, SCRIPT, "--check"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


def test_what_is_wrong_is_named(tmp_path):
    module = load()
    good = 'def test_{}_x():\n    """Does it.\n\n    More.\n    """\n'
    for letter, (_, numbers) in module.KINDS.items():
        (tmp_path / f"test_{letter}_x.py").write_text("".join(good.format(f"{number:02}") for number in numbers))
    assert module.problems(module.found(tmp_path)) == []
    bad = "def test_88_x():\n    pass\ndef test_01_x():\n    '''It.'''\n"
    (tmp_path / "test_k_x.py").write_text(good.format(87) + bad)
    assert module.problems(module.found(tmp_path)) == [
        "case 90 has no test",
        "test_k_x.py::test_01_x: 1 is no case of kind k",
        "test_k_x.py::test_88_x does not say what zft does",
    ]
    assert "| 87 | k: export | Does it. | `test_k_x.py::test_87_x` |\n" in module.table(module.found(tmp_path))
