"""What a resource as the cluster has it should become: a pure function."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.api import read_endpoint
from tandem.engine.validation import validate
from tandem.kube import Object
from tandem.operator.control.status import Outcome, Wanted
from tandem.operator.errors import RenderError
from tandem.operator.plan import Plan, plan
from tandem.operator.render import rendered
from tandem.operator.settings import Settings

UID_ANNOTATION = "tandem.dev/endpoint-uid"
"""On each object that the operator makes: the UID of the endpoint it is for."""


@dataclass(frozen=True)
class Desired:
    outcome: Outcome
    objects: tuple[Object, ...] = ()
    """Empty where nothing can be made of the resource: what is there then stays as it is."""
    drivers: tuple[str, ...] = ()
    """CSI drivers that their volumes need."""


def desired(found: Object, settings: Settings) -> Desired:
    """Nothing is raised, whatever the resource holds."""
    judged = {name: value for name, value in found.items() if name != "status"}
    report = validate(judged, model_config=settings.model_config, stored=True)
    warnings = tuple(f.said for f in report.warnings)
    if report.errors:
        problems = tuple(f.said for f in report.errors)
        return Desired(Outcome(problems=problems, problem_reason="Invalid", warnings=warnings))
    try:
        made = plan(read_endpoint(judged), settings)
        rendering = rendered(made)
    except RenderError as error:
        return Desired(Outcome(problems=(str(error),), warnings=warnings))
    told = {f.path for f in report.warnings} | {"connector"}  # that one is in status.transfer
    notes = [note for note in rendering.notes if note.partition(": ")[0] not in told]
    notes = [note for note in notes if not any(note in said for said in warnings)]
    outcome = Outcome(
        warnings=(*warnings, *notes),
        wanted=_wanted(made),
        disaggregated=made.spec.pd_spec is not None,
        transfer=_transfer(made),
        metrics=_metrics(made),
    )
    objects = tuple(_with_owner(o, found) for o in rendering.objects)
    return Desired(outcome, objects, tuple(sorted(_drivers(objects))))


def _drivers(objects: Iterable[Object]) -> set[str]:
    """Of persistent volumes, and of volumes that pods bring themselves."""
    volumes = [o["spec"] for o in objects if o["kind"] == "PersistentVolume"]
    pods = [o["spec"]["template"]["spec"] for o in objects if o["kind"] == "Deployment"]
    volumes += [volume for pod in pods for volume in pod.get("volumes", ())]
    return {volume["csi"]["driver"] for volume in volumes if "csi" in volume}


def _wanted(made: Plan) -> tuple[Wanted, ...]:
    namespace, system = made.names.namespace, made.names.system_namespace
    workers = [Wanted(pool.component, (namespace, made.names.pool(pool.role))) for pool in made.pools]
    if made.routed:
        workers.append(Wanted("router", (system, made.names.router)))
    return tuple(workers)


def _transfer(made: Plan) -> dict[str, str] | None:
    if made.spec.pd_spec is None:
        return None
    return {"connector": made.connector.name, "reason": made.connector.reason}


def _metrics(made: Plan) -> dict[str, object]:
    model = {"port": made.metrics.port, "path": made.metrics.path}
    return {"enabled": made.metrics.enabled, "modelMetrics": model}


def _with_owner(made: Object, endpoint: Object) -> Object:
    """Objects in the endpoint's namespace go with it even where no operator runs; owners elsewhere are not
    allowed. By the annotation the operator knows what it made from what was applied by hand."""
    owner, metadata = endpoint["metadata"], made["metadata"]
    annotations = metadata.get("annotations", {}) | {UID_ANNOTATION: owner["uid"]}
    metadata = metadata | {"annotations": annotations}
    if metadata.get("namespace") == owner["namespace"]:
        reference = {
            "apiVersion": endpoint["apiVersion"],
            "kind": endpoint["kind"],
            "name": owner["name"],
            "uid": owner["uid"],
            "controller": True,
        }
        metadata["ownerReferences"] = [reference]
    return {**made, "metadata": metadata}
