"""`hacrl studies`."""

from rich.table import Table
from rich.text import Text

from hacrl.cli.common import console


def studies() -> None:
    """List the bundled studies."""
    from hacrl.config.study import StudyConfig, study_names
    from hacrl.study.grid import Study

    listed = Table("name", "title", "teams", "algorithms", "runs")
    for name in study_names():
        study = Study.build(StudyConfig.load(name))
        words = name, study.config.title, ", ".join(study.teams), ", ".join(study.variants), str(len(study.runs))
        listed.add_row(*map(Text, words))
    console.print(listed)
    console.print(Text("Start one with `hacrl study NAME`; `--dry-run` shows its runs."))
