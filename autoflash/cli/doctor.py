"""`autoflash doctor`: what this machine has, what is missing, and what that means."""

from autoflash.cli.options import AsJson, print_json


def doctor(as_json: AsJson = False) -> None:
    """Say what this machine lacks, and what that means."""
    from dataclasses import asdict

    from autoflash.doctor import examine

    findings = examine()
    if as_json:
        print_json([asdict(finding) for finding in findings])
        return
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name:{width}}  {finding.found}")
        if finding.missing:
            print(f"{'':{width}}  ! {finding.missing}")
