/* ONNX Runtime for the iOS simulator in this process: one Mach-O object with everything in it, made to run on Linux. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What the object imports, and what stands for it here: made anew for each object, from what that imports. */
struct import {
  const char *name;
  void *place;
};

/* Sorted by name. */
extern const struct import imports[];
extern const unsigned import_count;

struct section {
  char name[16];
  char segment[16];
  uint64_t address, size;
  uint32_t offset, align, relocations, relocation_count, flags, reserved[3];
};

struct symbol {
  uint32_t name;
  uint8_t type, section;
  uint16_t description;
  uint64_t value;
};

struct relocation {
  int32_t address;
  uint32_t symbol : 24, relative : 1, length : 2, external : 1, type : 4;
};

/* The file as it lies in memory, and where its sections were mapped: each at `base` and its own address. */
struct image {
  const char *file;
  size_t file_size;
  const struct section *sections;
  unsigned section_count;
  const struct symbol *symbols;
  unsigned symbol_count;
  const char *names;
  size_t names_size;
  char *base;
  size_t size;        /* of the sections, in whole pages */
  char *jumps;        /* room behind them for jumps to what lies far off, */
  uint64_t *slots;    /* and for addresses that code loads */
  unsigned jump_count, slot_count;
  uint64_t *places;   /* where each symbol is */
};

/* Says why something cannot be; `dlerror` gives it to the runner. Returns false. */
bool fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* object.c: maps the file and its sections. */
bool read_object(const char *path, struct image *image);
const struct section *find_section(const struct image *image, const char *name);
const char *symbol_name(const struct image *image, const struct symbol *symbol);
char *find_symbol(const struct image *image, const char *name);

/* relocate.c: gives each symbol its place, and writes all places where they are used. */
bool bind_symbols(struct image *image);
bool relocate_sections(struct image *image);

/* unwind.c: tells the unwinder of this program the frames of the image. */
bool register_frames(struct image *image);

/* threads.c: thread variables. */
bool make_thread_variables(struct image *image);

/* coreml.cpp: puts our functions where the Core ML provider would ask Apple's framework. */
bool replace_functions(struct image *image);

/* The image that is loaded, for those who must know whether something lies in it. */
extern struct image the_image;
bool is_in_image(const void *place);

#ifdef __cplusplus
}
#endif
