/* libneuralnetworks.so: the interface of NNAPI, behind which no phone stands.
 *
 * ONNX Runtime's provider asks it for devices and hands it networks. It keeps them, and where edgekit computes for it
 * ($EDGEKIT_NNAPI_PIPES is a folder with the pipes `ask` and `answer`), sends each there, and then the inputs of each
 * run. One question is a line of JSON and then bytes; so is its answer. Without pipes, a network can be built but not
 * run. Numbers are those of Android's NeuralNetworksTypes.h. */
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum result { NO_ERROR = 0, OUT_OF_MEMORY = 1, BAD_DATA = 4, OP_FAILED = 5, UNMAPPABLE = 7 };
enum device_kind { CPU = 2, ACCELERATOR = 4 };
enum { UNKNOWN_SIZE = -1, MOST_DIMENSIONS = 16 };

struct operand_type {
  int32_t type;
  uint32_t rank;
  const uint32_t *dimensions;
  float scale;
  int32_t zero_point;
};

struct channel_scales {
  uint32_t dimension, count;
  const float *scales;
};

struct operand {
  struct operand_type type;
  uint32_t dimensions[MOST_DIMENSIONS];
  char *value; /* of `size` bytes, UNKNOWN_SIZE where it comes with a run, 0 where it is left out */
  int64_t size;
  struct channel_scales channels;
};

struct indices {
  uint32_t count, *items;
};

struct operation {
  int32_t type;
  struct indices inputs, outputs;
};

struct model {
  int id;
  struct operand *operands;
  struct operation *operations;
  uint32_t operand_count, operation_count;
  struct indices inputs, outputs;
  bool relaxed;
};

struct memory {
  char *bytes;
  size_t size;
};

struct part {
  char *bytes;
  size_t size;
  struct indices dimensions;
};

struct execution {
  const struct model *model;
  struct part *inputs, *outputs;
};

struct device {
  const char *name;
  enum device_kind kind;
};

/* A phone has at least these two: what its maker added, and Android's own kernels on the CPU. */
static const struct device devices[] = {{"edgekit-accelerator", ACCELERATOR}, {"nnapi-reference", CPU}};

/* What the user says of the first is in the environment: $EDGEKIT_NNAPI_DRIVER, _DRIVER_LEVEL and _REFUSED. */

static FILE *ask, *answer;
static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER;
static int model_count;

static void *grow(void *items, uint32_t count, size_t size) {
  /* One allocation for each power of two is enough. */
  return (count & (count - 1)) == 0 ? realloc(items, (count == 0 ? 1 : count * 2) * size) : items;
}

static struct indices copy_indices(uint32_t count, const uint32_t *items) {
  struct indices copy = {count, malloc(count * sizeof *items + 1)};
  if (count > 0) memcpy(copy.items, items, count * sizeof *items);
  return copy;
}

int64_t ANeuralNetworks_getRuntimeFeatureLevel(void) {
  const char *level = getenv("EDGEKIT_NNAPI_LEVEL");
  return level != NULL ? atoll(level) : 0;
}

int ANeuralNetworks_getDeviceCount(uint32_t *count) {
  *count = sizeof devices / sizeof *devices;
  return NO_ERROR;
}

int ANeuralNetworks_getDevice(uint32_t index, const struct device **device) {
  *device = &devices[index];
  return NO_ERROR;
}

int ANeuralNetworksDevice_getName(const struct device *device, const char **name) {
  const char *driver = device->kind == ACCELERATOR ? getenv("EDGEKIT_NNAPI_DRIVER") : NULL;
  *name = driver != NULL ? driver : device->name;
  return NO_ERROR;
}

int ANeuralNetworksDevice_getType(const struct device *device, int32_t *type) {
  *type = device->kind;
  return NO_ERROR;
}

int ANeuralNetworksDevice_getVersion(const struct device *device, const char **version) {
  (void)device;
  *version = "1";
  return NO_ERROR;
}

int ANeuralNetworksDevice_getFeatureLevel(const struct device *device, int64_t *level) {
  const char *own = device->kind == ACCELERATOR ? getenv("EDGEKIT_NNAPI_DRIVER_LEVEL") : NULL;
  *level = own != NULL ? atoll(own) : ANeuralNetworks_getRuntimeFeatureLevel();
  return NO_ERROR;
}

int ANeuralNetworksModel_create(struct model **model) {
  *model = calloc(1, sizeof **model);
  if (*model == NULL) return OUT_OF_MEMORY;
  (*model)->id = model_count++;
  return NO_ERROR;
}

void ANeuralNetworksModel_free(struct model *model) {
  for (uint32_t index = 0; index < model->operand_count; index++) {
    free(model->operands[index].value);
    free((void *)model->operands[index].channels.scales);
  }
  for (uint32_t index = 0; index < model->operation_count; index++) {
    free(model->operations[index].inputs.items);
    free(model->operations[index].outputs.items);
  }
  free(model->operands);
  free(model->operations);
  free(model->inputs.items);
  free(model->outputs.items);
  free(model);
}

int ANeuralNetworksModel_addOperand(struct model *model, const struct operand_type *type) {
  if (type->rank > MOST_DIMENSIONS) return BAD_DATA;
  model->operands = grow(model->operands, model->operand_count, sizeof *model->operands);
  struct operand *operand = &model->operands[model->operand_count++];
  *operand = (struct operand){.type = *type, .size = UNKNOWN_SIZE};
  if (type->rank > 0) memcpy(operand->dimensions, type->dimensions, type->rank * sizeof *type->dimensions);
  return NO_ERROR;
}

int ANeuralNetworksModel_setOperandValue(struct model *model, int32_t index, const void *value, size_t size) {
  struct operand *operand = &model->operands[index];
  operand->size = (int64_t)size;
  operand->value = malloc(size + 1);
  if (size > 0) memcpy(operand->value, value, size);
  return NO_ERROR;
}

int ANeuralNetworksModel_setOperandValueFromMemory(struct model *model, int32_t index, const struct memory *memory,
                                                   size_t offset, size_t size) {
  if (offset + size > memory->size) return BAD_DATA;
  return ANeuralNetworksModel_setOperandValue(model, index, memory->bytes + offset, size);
}

int ANeuralNetworksModel_setOperandSymmPerChannelQuantParams(struct model *model, int32_t index,
                                                             const struct channel_scales *channels) {
  float *scales = malloc(channels->count * sizeof *scales + 1);
  memcpy(scales, channels->scales, channels->count * sizeof *scales);
  model->operands[index].channels = (struct channel_scales){channels->dimension, channels->count, scales};
  return NO_ERROR;
}

int ANeuralNetworksModel_addOperation(struct model *model, int32_t type, uint32_t input_count, const uint32_t *inputs,
                                      uint32_t output_count, const uint32_t *outputs) {
  model->operations = grow(model->operations, model->operation_count, sizeof *model->operations);
  model->operations[model->operation_count++] = (struct operation){
      type, copy_indices(input_count, inputs), copy_indices(output_count, outputs)};
  return NO_ERROR;
}

int ANeuralNetworksModel_identifyInputsAndOutputs(struct model *model, uint32_t input_count, const uint32_t *inputs,
                                                  uint32_t output_count, const uint32_t *outputs) {
  model->inputs = copy_indices(input_count, inputs);
  model->outputs = copy_indices(output_count, outputs);
  return NO_ERROR;
}

int ANeuralNetworksModel_relaxComputationFloat32toFloat16(struct model *model, bool relaxed) {
  model->relaxed = relaxed;
  return NO_ERROR;
}

static void write_indices(const char *key, const uint32_t *items, uint32_t count) {
  fprintf(ask, "\"%s\":[", key);
  for (uint32_t index = 0; index < count; index++) fprintf(ask, "%s%u", index > 0 ? "," : "", items[index]);
  fprintf(ask, "]");
}

static void write_operand(const struct operand *operand) {
  fprintf(ask, "{\"type\":%d,\"scale\":%.9g,\"zero_point\":%d,\"size\":%lld,\"channel_dimension\":%u,\"channel_scales\":[",
          operand->type.type, (double)operand->type.scale, operand->type.zero_point, (long long)operand->size,
          operand->channels.dimension);
  for (uint32_t index = 0; index < operand->channels.count; index++) {
    fprintf(ask, "%s%.9g", index > 0 ? "," : "", (double)operand->channels.scales[index]);
  }
  fprintf(ask, "],");
  write_indices("shape", operand->dimensions, operand->type.rank);
  fprintf(ask, "}");
}

static void write_model(const struct model *model) {
  fprintf(ask, "{\"ask\":\"model\",\"id\":%d,\"relaxed\":%s,\"operands\":[", model->id,
          model->relaxed ? "true" : "false");
  for (uint32_t index = 0; index < model->operand_count; index++) {
    if (index > 0) fprintf(ask, ",");
    write_operand(&model->operands[index]);
  }
  fprintf(ask, "],\"operations\":[");
  for (uint32_t index = 0; index < model->operation_count; index++) {
    const struct operation *operation = &model->operations[index];
    fprintf(ask, "%s{\"type\":%d,", index > 0 ? "," : "", operation->type);
    write_indices("inputs", operation->inputs.items, operation->inputs.count);
    fprintf(ask, ",");
    write_indices("outputs", operation->outputs.items, operation->outputs.count);
    fprintf(ask, "}");
  }
  fprintf(ask, "],");
  write_indices("inputs", model->inputs.items, model->inputs.count);
  fprintf(ask, ",");
  write_indices("outputs", model->outputs.items, model->outputs.count);
  fprintf(ask, "}\n");
  for (uint32_t index = 0; index < model->operand_count; index++) {
    const struct operand *operand = &model->operands[index];
    if (operand->size > 0) fwrite(operand->value, 1, (size_t)operand->size, ask);
  }
}

/* Whoever started this process holds both ends of both pipes while the other side lives. Without waiting for that side,
 * a pipe that nobody holds any more fails to open, or ends. */
static FILE *open_pipe(const char *folder, const char *name, int access, const char *mode) {
  char path[PATH_MAX];
  snprintf(path, sizeof path, "%s/%s", folder, name);
  const int file = open(path, access | O_NONBLOCK | O_CLOEXEC);
  if (file >= 0) fcntl(file, F_SETFL, access);
  return file < 0 ? NULL : fdopen(file, mode);
}

/* Returns false where nobody computes. */
static bool open_pipes(void) {
  const char *folder = getenv("EDGEKIT_NNAPI_PIPES");
  if (folder != NULL && ask == NULL) {
    ask = open_pipe(folder, "ask", O_WRONLY, "wb");
    answer = open_pipe(folder, "answer", O_RDONLY, "rb");
  }
  return ask != NULL && answer != NULL;
}

/* Reads the line of an answer: empty where all went well, else why it did not. */
static enum result read_answer(void) {
  char line[512];
  if (fflush(ask) != 0 || fgets(line, sizeof line, answer) == NULL) return OP_FAILED;
  if (line[0] == '\n') return NO_ERROR;
  fprintf(stderr, "NNAPI: %s", line);
  return OP_FAILED;
}

int ANeuralNetworksModel_finish(struct model *model) {
  pthread_mutex_lock(&asking);
  enum result result = NO_ERROR;
  if (open_pipes()) {
    write_model(model);
    result = read_answer();
  }
  pthread_mutex_unlock(&asking);
  return result;
}

/* Returns true if $EDGEKIT_NNAPI_REFUSED, numbers with commas between them, names an operation. */
static bool is_refused(int32_t type) {
  for (const char *at = getenv("EDGEKIT_NNAPI_REFUSED"); at != NULL && *at != '\0';) {
    char *end = NULL;
    if (strtol(at, &end, 10) == type && end != at) return true;
    at = *end == ',' ? end + 1 : NULL;
  }
  return false;
}

int ANeuralNetworksModel_getSupportedOperationsForDevices(const struct model *model,
                                                          const struct device *const *asked, uint32_t count,
                                                          bool *supported) {
  bool by_reference = false;
  for (uint32_t index = 0; index < count; index++) by_reference |= asked[index]->kind == CPU;
  for (uint32_t index = 0; index < model->operation_count; index++) {
    supported[index] = by_reference || !is_refused(model->operations[index].type);
  }
  return NO_ERROR;
}

int ANeuralNetworksCompilation_create(struct model *model, struct model **compilation) {
  *compilation = model;
  return NO_ERROR;
}

int ANeuralNetworksCompilation_createForDevices(struct model *model, const struct device *const *asked, uint32_t count,
                                                struct model **compilation) {
  (void)asked;
  (void)count;
  return ANeuralNetworksCompilation_create(model, compilation);
}

void ANeuralNetworksCompilation_free(struct model *compilation) { (void)compilation; }

int ANeuralNetworksCompilation_setPreference(struct model *compilation, int32_t preference) {
  (void)compilation;
  (void)preference;
  return NO_ERROR;
}

int ANeuralNetworksCompilation_finish(struct model *compilation) {
  (void)compilation;
  return NO_ERROR;
}

int ANeuralNetworksMemory_createFromFd(size_t size, int protection, int file, size_t offset, struct memory **memory) {
  void *bytes = mmap(NULL, size, protection, MAP_SHARED, file, (off_t)offset);
  if (bytes == MAP_FAILED) return UNMAPPABLE;
  *memory = malloc(sizeof **memory);
  **memory = (struct memory){bytes, size};
  return NO_ERROR;
}

void ANeuralNetworksMemory_free(struct memory *memory) {
  munmap(memory->bytes, memory->size);
  free(memory);
}

int ANeuralNetworksExecution_create(struct model *compilation, struct execution **execution) {
  *execution = malloc(sizeof **execution);
  **execution = (struct execution){compilation, calloc(compilation->inputs.count + 1, sizeof(struct part)),
                                   calloc(compilation->outputs.count + 1, sizeof(struct part))};
  return NO_ERROR;
}

static void free_parts(struct part *parts, uint32_t count) {
  for (uint32_t index = 0; index < count; index++) free(parts[index].dimensions.items);
  free(parts);
}

void ANeuralNetworksExecution_free(struct execution *execution) {
  free_parts(execution->inputs, execution->model->inputs.count);
  free_parts(execution->outputs, execution->model->outputs.count);
  free(execution);
}

static enum result set_part(struct part *part, const struct operand_type *type, void *bytes, size_t size) {
  free(part->dimensions.items);
  *part = (struct part){bytes, size, {0, NULL}};
  if (type != NULL) part->dimensions = copy_indices(type->rank, type->dimensions);
  return NO_ERROR;
}

int ANeuralNetworksExecution_setInput(struct execution *execution, int32_t index, const struct operand_type *type,
                                      const void *bytes, size_t size) {
  return set_part(&execution->inputs[index], type, (void *)bytes, size);
}

int ANeuralNetworksExecution_setInputFromMemory(struct execution *execution, int32_t index,
                                                const struct operand_type *type, const struct memory *memory,
                                                size_t offset, size_t size) {
  return set_part(&execution->inputs[index], type, memory->bytes + offset, size);
}

int ANeuralNetworksExecution_setOutput(struct execution *execution, int32_t index, const struct operand_type *type,
                                       void *bytes, size_t size) {
  return set_part(&execution->outputs[index], type, bytes, size);
}

int ANeuralNetworksExecution_setOutputFromMemory(struct execution *execution, int32_t index,
                                                 const struct operand_type *type, const struct memory *memory,
                                                 size_t offset, size_t size) {
  return set_part(&execution->outputs[index], type, memory->bytes + offset, size);
}

static void write_parts(const char *key, const struct part *parts, uint32_t count) {
  fprintf(ask, "\"%s\":[", key);
  for (uint32_t index = 0; index < count; index++) {
    fprintf(ask, "%s{\"size\":%zu,", index > 0 ? "," : "", parts[index].size);
    write_indices("shape", parts[index].dimensions.items, parts[index].dimensions.count);
    fprintf(ask, "}");
  }
  fprintf(ask, "]");
}

static enum result run_elsewhere(struct execution *execution) {
  const struct model *model = execution->model;
  fprintf(ask, "{\"ask\":\"run\",\"id\":%d,", model->id);
  write_parts("inputs", execution->inputs, model->inputs.count);
  fprintf(ask, ",");
  write_parts("outputs", execution->outputs, model->outputs.count);
  fprintf(ask, "}\n");
  for (uint32_t index = 0; index < model->inputs.count; index++) {
    fwrite(execution->inputs[index].bytes, 1, execution->inputs[index].size, ask);
  }
  enum result result = read_answer();
  for (uint32_t index = 0; result == NO_ERROR && index < model->outputs.count; index++) {
    const struct part *part = &execution->outputs[index];
    if (fread(part->bytes, 1, part->size, answer) != part->size) result = OP_FAILED;
  }
  return result;
}

int ANeuralNetworksExecution_compute(struct execution *execution) {
  pthread_mutex_lock(&asking);
  enum result result = OP_FAILED;
  if (open_pipes()) result = run_elsewhere(execution);
  else fprintf(stderr, "NNAPI: nothing here computes its networks: pip install ai-edge-litert==2.3.0\n");
  pthread_mutex_unlock(&asking);
  return result;
}

int ANeuralNetworksExecution_startCompute(struct execution *execution, enum result **event) {
  *event = malloc(sizeof **event);
  **event = (enum result)ANeuralNetworksExecution_compute(execution);
  return NO_ERROR;
}

int ANeuralNetworksEvent_wait(enum result *event) { return *event; }

void ANeuralNetworksEvent_free(enum result *event) { free(event); }

static const struct operand *find_output(const struct execution *execution, int32_t index) {
  return &execution->model->operands[execution->model->outputs.items[index]];
}

int ANeuralNetworksExecution_getOutputOperandRank(struct execution *execution, int32_t index, uint32_t *rank) {
  *rank = find_output(execution, index)->type.rank;
  return NO_ERROR;
}

int ANeuralNetworksExecution_getOutputOperandDimensions(struct execution *execution, int32_t index,
                                                        uint32_t *dimensions) {
  const struct operand *operand = find_output(execution, index);
  memcpy(dimensions, operand->dimensions, operand->type.rank * sizeof *dimensions);
  return NO_ERROR;
}
