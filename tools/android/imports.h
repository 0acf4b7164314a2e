/* What the libraries that are loaded may import: made anew for each archive, from what that archive imports. */
#pragma once

struct import {
  const char *name;
  void *place;
};

/* Sorted by name. */
extern const struct import imports[];
extern const unsigned import_count;
