/* Binds the object: each symbol gets a place, each relocation is written (Apple's mach-o/x86_64/reloc.h). */
#include <stdlib.h>
#include <string.h>

#include "image.h"

enum { KIND_MASK = 0x0e, UNDEFINED = 0, ABSOLUTE = 2, IN_SECTION = 0x0e, EXTERNAL = 1 };
enum { UNSIGNED = 0, SIGNED, BRANCH, GOT_LOAD, GOT, SUBTRACTOR, SIGNED_1, SIGNED_2, SIGNED_4, TLV };
enum { JUMP_SIZE = 16, WORD = 2, QUAD = 3 };

static int compare_import(const void *name, const void *entry) {
  return strcmp(name, ((const struct import *)entry)->name);
}

static void *find_import(const char *name) {
  const struct import *found = bsearch(name, imports, import_count, sizeof *imports, compare_import);
  return found != NULL ? found->place : NULL;
}

bool bind_symbols(struct image *image) {
  for (unsigned index = 0; index < image->symbol_count; index++) {
    const struct symbol *symbol = &image->symbols[index];
    switch (symbol->type & KIND_MASK) {
      case IN_SECTION: image->places[index] = (uint64_t)(image->base + symbol->value); continue;
      case ABSOLUTE: image->places[index] = symbol->value; continue;
      case UNDEFINED: break;
      default: continue;
    }
    const char *name = symbol_name(image, symbol);
    if (!(symbol->type & EXTERNAL)) continue;
    image->places[index] = (uint64_t)find_import(name);
    if (image->places[index] == 0) return fail("the object imports %s, which this program lacks", name);
  }
  return true;
}

/* Code reaches two GiB around itself. What lies farther is reached through a jump beside the image. */
static uint64_t find_near(struct image *image, uint32_t symbol, uint64_t *jumps) {
  const uint64_t place = image->places[symbol];
  if (is_in_image((void *)place)) return place;
  if (jumps[symbol] == 0) {
    char *jump = image->jumps + JUMP_SIZE * (size_t)image->jump_count++;
    memcpy(jump, "\xff\x25\0\0\0\0", 6); /* jmp *(%rip) */
    memcpy(jump + 6, &place, sizeof place);
    jumps[symbol] = (uint64_t)jump;
  }
  return jumps[symbol];
}

static uint64_t find_slot(struct image *image, uint32_t symbol, uint64_t *slots) {
  if (slots[symbol] == 0) {
    slots[symbol] = (uint64_t)&image->slots[image->slot_count];
    image->slots[image->slot_count++] = image->places[symbol];
  }
  return slots[symbol];
}

struct tables {
  uint64_t *jumps, *slots;
};

static bool write_whole(const struct image *image, const struct relocation *entry, char *place) {
  if (entry->length != QUAD) return fail("the object has an address of %d bytes", 1 << entry->length);
  uint64_t value;
  memcpy(&value, place, sizeof value);
  value += entry->external ? image->places[entry->symbol] : (uint64_t)image->base;
  memcpy(place, &value, sizeof value);
  return true;
}

/* The distance of two symbols, in two entries: what is taken away, then what it is taken from. */
static bool write_distance(const struct image *image, const struct relocation *entry, char *place) {
  const struct relocation *second = entry + 1;
  if (second->type != UNSIGNED || !entry->external || !second->external) return fail("the object has a strange distance");
  const uint64_t distance = image->places[second->symbol] - image->places[entry->symbol];
  uint64_t value = 0;
  memcpy(&value, place, (size_t)1 << entry->length);
  value += distance;
  memcpy(place, &value, (size_t)1 << entry->length);
  return true;
}

/* What code reaches from where it stands; where its symbol is a section of the image, it is right as it is. */
static bool write_relative(struct image *image, const struct relocation *entry, char *place, struct tables *tables) {
  if (!entry->external) return true;
  uint64_t target = 0;
  switch (entry->type) {
    case GOT:
    case GOT_LOAD: target = find_slot(image, entry->symbol, tables->slots); break;
    /* The address of a variable's descriptor is loaded from a slot, as GOT_LOAD does. */
    case TLV: target = find_slot(image, entry->symbol, tables->slots); break;
    case SIGNED:
    case SIGNED_1:
    case SIGNED_2:
    case SIGNED_4:
    case BRANCH: target = find_near(image, entry->symbol, tables->jumps); break;
    default: return fail("the object has relocations of kind %d", (int)entry->type);
  }
  int32_t value;
  memcpy(&value, place, sizeof value);
  const int64_t distance = (int64_t)target + value - (int64_t)(place + 4);
  if (distance != (int32_t)distance) return fail("the object is too large to be linked");
  value = (int32_t)distance;
  memcpy(place, &value, sizeof value);
  return true;
}

static bool relocate_section(struct image *image, const struct section *section, struct tables *tables) {
  const struct relocation *entry = (const void *)(image->file + section->relocations);
  const struct relocation *end = entry + section->relocation_count;
  for (; entry < end; entry++) {
    char *place = image->base + section->address + entry->address;
    const bool inside = entry->address >= 0 && (uint64_t)entry->address + 4 <= section->size;
    if (!inside || (entry->external && entry->symbol >= image->symbol_count)) return fail("the object is damaged");
    if (entry->type == SUBTRACTOR) {
      if (entry + 1 == end || !write_distance(image, entry, place)) return fail("the object has a strange distance");
      entry++;
    } else if (entry->type == UNSIGNED) {
      if (!write_whole(image, entry, place)) return false;
    } else if (!write_relative(image, entry, place, tables)) {
      return false;
    }
  }
  return true;
}

bool relocate_sections(struct image *image) {
  struct tables tables = {calloc(image->symbol_count, 8), calloc(image->symbol_count, 8)};
  if (tables.jumps == NULL || tables.slots == NULL) return fail("there is no memory for the object");
  bool done = true;
  for (unsigned index = 0; done && index < image->section_count; index++) {
    done = relocate_section(image, &image->sections[index], &tables);
  }
  free(tables.jumps);
  free(tables.slots);
  return done;
}
