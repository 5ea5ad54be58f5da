"""Service accounts, and what they may do: the router's sees the pods of the endpoint's namespace. The models'
have no right in the API, and their pods no token."""

from __future__ import annotations

from tandem.operator.objects.common import Object, head
from tandem.operator.plan import Plan


def model_account(plan: Plan) -> Object | None:
    """The model pods'; None where the resource names one of its own."""
    kubernetes = plan.spec.kubernetes
    if kubernetes is not None and kubernetes.service_account_name:
        return None
    component = plan.pools[0].component if len(plan.pools) == 1 else "model"
    made = head(plan, "v1", "ServiceAccount", plan.names.account, component)
    return made | {"automountServiceAccountToken": False}


def router_account(plan: Plan) -> Object:
    made = head(plan, "v1", "ServiceAccount", plan.names.router, "router", system=True)
    return made | {"automountServiceAccountToken": False}


def router_rights(plan: Plan) -> list[Object]:
    """A role in the endpoint's namespace and its binding to the router's account. Rights are given for all
    pods of a namespace or for named ones, not by labels."""
    name, group = plan.names.router, "rbac.authorization.k8s.io"
    role = head(plan, f"{group}/v1", "Role", name, "router") | {
        "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]
    }
    binding = head(plan, f"{group}/v1", "RoleBinding", name, "router") | {
        "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
        "subjects": [
            {"kind": "ServiceAccount", "name": name, "namespace": plan.names.system_namespace},
        ],
    }
    return [role, binding]
