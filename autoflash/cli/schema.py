"""`autoflash schema`: the JSON Schema of workload files, for editors."""


def schema() -> None:
    """Print the JSON Schema of workloads, for editors."""
    import json

    from autoflash.workload import workload_schema

    print(json.dumps(workload_schema(), indent=2))
