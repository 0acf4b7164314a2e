/* Reads the object: a 64-bit Mach-O file of kind MH_OBJECT for x86-64 (Apple's mach-o/loader.h, nlist.h). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "image.h"

enum {
  MAGIC = 0xfeedfacf,
  CPU_X86_64 = 0x01000007,
  KIND_OBJECT = 1,
  LC_SYMTAB = 2,
  LC_SEGMENT_64 = 0x19,
  HEADER_SIZE = 32,
  SEGMENT_SIZE = 72,
  PAGE = 4096,
  JUMP_SIZE = 16,
  TYPE_MASK = 0xff,
  ZERO_FILLED = 1,
  THREAD_ZERO_FILLED = 0x12,
};

static bool holds(const struct image *image, uint64_t offset, uint64_t size) {
  return offset <= image->file_size && size <= image->file_size - offset;
}

static uint32_t word_at(const struct image *image, size_t offset) {
  uint32_t word;
  memcpy(&word, image->file + offset, sizeof word);
  return word;
}

static bool map_file(const char *path, struct image *image) {
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  struct stat facts;
  if (file < 0 || fstat(file, &facts) != 0) return fail("'%s' cannot be read", path);
  image->file_size = (size_t)facts.st_size;
  image->file = mmap(NULL, image->file_size, PROT_READ, MAP_PRIVATE, file, 0);
  close(file);
  if (image->file == MAP_FAILED || image->file_size < HEADER_SIZE || word_at(image, 0) != MAGIC ||
      word_at(image, 4) != CPU_X86_64 || word_at(image, 12) != KIND_OBJECT) {
    return fail("'%s' is no Mach-O object for x86-64", path);
  }
  return true;
}

static bool read_commands(const char *path, struct image *image) {
  size_t at = HEADER_SIZE;
  for (uint32_t left = word_at(image, 16); left > 0; left--) {
    if (!holds(image, at, 8) || !holds(image, at, word_at(image, at + 4))) return fail("'%s' is cut off", path);
    if (word_at(image, at) == LC_SEGMENT_64) {
      image->sections = (const void *)(image->file + at + SEGMENT_SIZE);
      image->section_count = word_at(image, at + 64);
      if (!holds(image, at + SEGMENT_SIZE, image->section_count * sizeof *image->sections)) {
        return fail("'%s' is cut off", path);
      }
    } else if (word_at(image, at) == LC_SYMTAB) {
      image->symbols = (const void *)(image->file + word_at(image, at + 8));
      image->symbol_count = word_at(image, at + 12);
      image->names = image->file + word_at(image, at + 16);
      image->names_size = word_at(image, at + 20);
      if (!holds(image, word_at(image, at + 8), image->symbol_count * sizeof *image->symbols) ||
          !holds(image, word_at(image, at + 16), image->names_size) || image->names_size == 0 ||
          image->names[image->names_size - 1] != '\0') {
        return fail("'%s' is cut off", path);
      }
    }
    at += word_at(image, at + 4);
  }
  return (image->sections != NULL && image->symbols != NULL) || fail("'%s' has no sections or no symbols", path);
}

static bool is_zero_filled(const struct section *section) {
  const uint32_t type = section->flags & TYPE_MASK;
  return type == ZERO_FILLED || type == THREAD_ZERO_FILLED;
}

/* Maps the sections as they lie: distances between them stay, so that code that was bound to them stays right. */
static bool map_sections(const char *path, struct image *image) {
  for (unsigned index = 0; index < image->section_count; index++) {
    const struct section *section = &image->sections[index];
    const uint64_t end = section->address + section->size;
    if (section->address > UINT32_MAX || section->size > UINT32_MAX ||
        (!is_zero_filled(section) && !holds(image, section->offset, section->size)) ||
        !holds(image, section->relocations, section->relocation_count * sizeof(struct relocation))) {
      return fail("'%s' is cut off", path);
    }
    if (end > image->size) image->size = end;
  }
  image->size = (image->size + PAGE - 1) & ~(size_t)(PAGE - 1);
  const size_t jumps = (size_t)import_count * JUMP_SIZE, slots = (size_t)image->symbol_count * 8;
  const int rights = PROT_READ | PROT_WRITE | PROT_EXEC;
  image->base = mmap(NULL, image->size + jumps + slots, rights, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  image->places = mmap(NULL, slots, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (image->base == MAP_FAILED || image->places == MAP_FAILED) return fail("there is no memory for '%s'", path);
  image->jumps = image->base + image->size;
  image->slots = (uint64_t *)(image->jumps + jumps);
  for (unsigned index = 0; index < image->section_count; index++) {
    const struct section *section = &image->sections[index];
    if (is_zero_filled(section)) continue;
    memcpy(image->base + section->address, image->file + section->offset, section->size);
  }
  return true;
}

bool read_object(const char *path, struct image *image) {
  return map_file(path, image) && read_commands(path, image) && map_sections(path, image);
}

const struct section *find_section(const struct image *image, const char *name) {
  for (unsigned index = 0; index < image->section_count; index++) {
    if (strncmp(image->sections[index].name, name, sizeof image->sections[index].name) == 0) {
      return &image->sections[index];
    }
  }
  return NULL;
}

const char *symbol_name(const struct image *image, const struct symbol *symbol) {
  return symbol->name < image->names_size ? image->names + symbol->name : "";
}

enum { KIND_MASK = 0x0e, IN_SECTION = 0x0e };

/* Finds a symbol that the object defines, local ones too. */
char *find_symbol(const struct image *image, const char *name) {
  for (unsigned index = 0; index < image->symbol_count; index++) {
    const struct symbol *symbol = &image->symbols[index];
    if ((symbol->type & KIND_MASK) == IN_SECTION && strcmp(symbol_name(image, symbol), name) == 0) {
      return image->base + symbol->value;
    }
  }
  return NULL;
}

bool is_in_image(const void *place) {
  return (const char *)place >= the_image.base && (const char *)place < the_image.base + the_image.size;
}
