// Two tables of what checks.cpp imports: `imports`, as edgekit writes it, and this one, of what this machine has under
// the same names.
#include "image.h"
#define imports own_places
#define import_count own_count
