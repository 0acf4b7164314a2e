"""Making a model ready: static shapes, a clean graph, and the rewrites that providers ask for."""

from edgekit.prepare.clean import prepare_model as prepare_model
from edgekit.prepare.fix import Fix as Fix
from edgekit.prepare.fix import FixedModel as FixedModel
from edgekit.prepare.fix import fix_model as fix_model
from edgekit.prepare.fix import ready_model as ready_model
