/* The library's functions: which kernels this CPU has, and the threads that share the work. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "owned.h"

#ifdef HAVE_AVX512
extern const Kernels kernels_avx512;
#endif
#ifdef HAVE_AVX2
extern const Kernels kernels_avx2;
#endif
#ifdef HAVE_PORTABLE
extern const Kernels kernels_portable;
#endif

/* The library's builds differ in this number where their structures do. */
int plures_interface(void) { return PLURES_INTERFACE; }

/* The size of a structure, by its place in the order of Python's STRUCTURES: the library is used only if both agree. */
int64_t plures_size(int which) {
    const int64_t sizes[] = {sizeof(Convolution), sizeof(Blocking), sizeof(Affine), sizeof(KernelGradient), sizeof(Norm), sizeof(Linear), sizeof(Rows),
                             sizeof(Digits), sizeof(Placing)};
    return sizes[which];
}

/* The best kernels that this CPU can run, or those asked for by name; NULL where it cannot run them. */
const Kernels *plures_kernels(const char *wanted) {
#ifdef HAVE_AVX512
    if ((!wanted || !strcmp(wanted, "avx512")) && __builtin_cpu_supports("avx512f")) return &kernels_avx512;
#endif
#ifdef HAVE_AVX2
    if ((!wanted || !strcmp(wanted, "avx2")) && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
        return &kernels_avx2;
#endif
#ifdef HAVE_PORTABLE
    if (!wanted || !strcmp(wanted, "portable")) return &kernels_portable;
#endif
    return NULL;
}

/* The best set of instructions of this CPU, whichever were compiled. */
const char *plures_level(void) {
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx512f")) return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "portable";
}

int plures_lanes(const Kernels *kernels) { return kernels->lanes; }
const char *plures_instructions(const Kernels *kernels) { return kernels->instructions; }

/* ---- threads ---- */

typedef void Parallel(void (*work)(void *), void *job, unsigned threads, unsigned flags);
static Parallel *parallel;

/* Share the threads of the OpenMP that torch has loaded (its GOMP_parallel): threads of our own would have to fight with
   torch's, which keep spinning for a while after each of its operators. */
void plures_use_threads(void *gomp_parallel) { parallel = (Parallel *)gomp_parallel; }

typedef struct Job {
    const Kernels *kernels;
    const void *layer;
    void (*item)(const struct Job *, int64_t, void *);
    int64_t items, scratch;
    int threads;
    atomic_llong next;
    atomic_int failed;
} Job;

static void work(void *given) {
    Job *job = given;
    void *scratch = NULL;
    if (job->scratch && posix_memalign(&scratch, 64, job->scratch)) {
        atomic_store(&job->failed, 1);
        return;
    }
    for (int64_t item = atomic_fetch_add(&job->next, 1); item < job->items; item = atomic_fetch_add(&job->next, 1))
        job->item(job, item, scratch);
    free(scratch);
}

static void *work_of_thread(void *job) {
    work(job);
    return NULL;
}

#define MOST_THREADS 256

/* Returns 0, or 1 where memory has run out. */
static int share(Job *job) {
    int threads = job->threads < job->items ? job->threads : (int)job->items;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads <= 1) {
        work(job);
    } else if (parallel) {
        parallel(work, job, threads, 0);
    } else {
        pthread_t others[MOST_THREADS];
        int started = 0;
        while (started < threads - 1 && !pthread_create(&others[started], NULL, work_of_thread, job)) started++;
        work(job);
        while (started) pthread_join(others[--started], NULL);
    }
    return atomic_load(&job->failed) != 0;
}

/* Ask for large pages where an output is large: the activations of all members are new memory with every layer, and the
   system hands it out page by page while it is written. That took a tenth of the time, and more with more members. */
#define LARGE_PAGE ((uintptr_t)2 << 20)

static void prefer_large_pages(void *output, int64_t floats) {
#ifdef MADV_HUGEPAGE
    const uintptr_t start = ((uintptr_t)output + LARGE_PAGE - 1) & ~(LARGE_PAGE - 1);
    const uintptr_t end = ((uintptr_t)output + floats * sizeof(float)) & ~(LARGE_PAGE - 1);
    if (start < end) madvise((void *)start, end - start, MADV_HUGEPAGE);
#else
    (void)output, (void)floats;
#endif
}

static void convolution_item(const Job *job, int64_t item, void *scratch) {
    job->kernels->convolution_item(job->layer, job->threads, item, scratch);
}

static Job convolution_job(const Kernels *kernels, const Convolution *layer, int threads) {
    prefer_large_pages(layer->output, (int64_t)layer->members * layer->images * layer->outputs * layer->output_height
                                          * layer->output_width * layer->lanes);
    return (Job){.kernels = kernels, .layer = layer, .item = convolution_item, .threads = threads,
                 .items = kernels->convolution_items(layer, threads), .scratch = kernels->convolution_scratch(layer)};
}

int plures_convolution(const Kernels *kernels, const Convolution *layer, int threads) {
    Job job = convolution_job(kernels, layer, threads);
    return share(&job);
}

static void rows_item(const Job *job, int64_t item, void *scratch) { job->kernels->rows_item(job->layer, item, scratch); }

/* What one thread can do while another one wakes up, in multiplications. */
#define FEW 200000

int plures_rows(const Kernels *kernels, const Rows *layer, int threads) {
    Job job = {.kernels = kernels, .layer = layer, .item = rows_item, .threads = threads};
    job.items = kernels->rows_items(layer);
    job.scratch = kernels->rows_scratch(layer);
    int64_t products = 0;
    for (int i = 0; i < layer->count; i++) products += (int64_t)layer->layers[i].forward.inputs * layer->layers[i].forward.outputs;
    if (products * layer->rows < FEW) job.threads = 1;
    return share(&job);
}

/* ---- training ---- */

static void gradient_item(const Job *job, int64_t item, void *scratch) { job->kernels->training->gradient_item(job->layer, item, scratch); }

static void norm_item(const Job *job, int64_t channel, void *scratch) {
    (void)scratch;
    job->kernels->training->norm_item(job->layer, channel);
}

static Job job_of(const Kernels *kernels, int kind, const void *layer, int threads) {
    if (kind == STEP_CONVOLUTION) return convolution_job(kernels, layer, threads);
    Job job = {.kernels = kernels, .layer = layer, .item = gradient_item, .threads = threads};
    if (kind == STEP_GRADIENT) {
        job.items = kernels->training->gradient_items(layer);
        job.scratch = kernels->training->gradient_scratch(layer);
    } else {
        const Norm *norm = layer;
        job.item = norm_item;
        job.items = norm->members * norm->channels;
        prefer_large_pages(norm->backward ? norm->to_input : norm->output, norm->blocks * norm->channels * norm->pixels);
    }
    return job;
}

/* Run some steps, one after the other, for one member after the other: what a step writes is still in the cache when the next
   one reads it. The items of a member follow one another. */
int plures_steps(const Kernels *kernels, const int *kinds, const void *const *layers, int steps, int members, int threads) {
    for (int member = 0; member < members; member++)
        for (int step = 0; step < steps; step++) {
            Job job = job_of(kernels, kinds[step], layers[step], threads);
            const int64_t each = job.items / members;
            atomic_store(&job.next, member * each);
            job.items = (member + 1) * each;
            if (share(&job)) return 1;
        }
    return 0;
}

/* ---- layouts and factors: no arithmetic worth a second build ---- */

/* One channel of one block of images. */
static void block_item(const Job *job, int64_t item, void *scratch) {
    (void)scratch;
    const Blocking *b = job->layer;
    const int channel = item % b->channels;
    const int64_t first = item / b->channels * b->lanes;
    float *to = b->blocked + item * b->height * b->width * b->lanes;
    for (int y = 0; y < b->height; y++)
        for (int lane = 0; lane < b->lanes; lane++) {
            float *line = to + (int64_t)y * b->width * b->lanes + lane;
            const float *from = b->plain + (first + lane) * b->image_stride + channel * b->channel_stride + y * b->row_stride;
            if (first + lane < b->images)
                for (int x = 0; x < b->width; x++) line[(int64_t)x * b->lanes] = from[x * b->column_stride];
            else
                for (int x = 0; x < b->width; x++) line[(int64_t)x * b->lanes] = 0;
        }
}

static void unblock_item(const Job *job, int64_t item, void *scratch) {
    (void)scratch;
    const Blocking *b = job->layer;
    const int channel = item % b->channels;
    const int64_t first = item / b->channels * b->lanes;
    const float *from = b->blocked + item * b->height * b->width * b->lanes;
    for (int lane = 0; lane < b->lanes && first + lane < b->images; lane++)
        for (int y = 0; y < b->height; y++) {
            const float *line = from + (int64_t)y * b->width * b->lanes + lane;
            float *to = b->plain + (first + lane) * b->image_stride + channel * b->channel_stride + y * b->row_stride;
            for (int x = 0; x < b->width; x++) to[x * b->column_stride] = line[(int64_t)x * b->lanes];
        }
}

int plures_block(const Blocking *layout, int back, int threads) {
    Job job = {.layer = layout, .item = back ? unblock_item : block_item, .threads = threads};
    job.items = (int64_t)(layout->images + layout->lanes - 1) / layout->lanes * layout->channels;
    return share(&job);
}

static void affine_item(const Job *job, int64_t item, void *scratch) {
    (void)scratch;
    const Affine *a = job->layer;
    const int64_t channel = item % a->channels, member = item / a->channels / a->images, map = item % ((int64_t)a->channels * a->images);
    const float factor = a->factor[member * a->channels + channel], shift = a->shift[member * a->channels + channel];
    const float *from = a->input + member * a->input_member_stride + map * a->pixels;
    float *to = a->output + item * a->pixels;
    if (a->relu)
        for (int64_t i = 0; i < a->pixels; i++) {
            const float value = from[i] * factor + shift;
            to[i] = value < 0 ? 0 : a->relu == 6 && value > 6 ? 6 : value;
        }
    else
        for (int64_t i = 0; i < a->pixels; i++) to[i] = from[i] * factor + shift;
}

int plures_affine(const Affine *layer, int threads) {
    Job job = {.layer = layer, .item = affine_item, .threads = threads};
    job.items = (int64_t)layer->members * layer->images * layer->channels;
    prefer_large_pages(layer->output, job.items * layer->pixels);
    return share(&job);
}

/* ---- files: owners and values, in one pass each ---- */

#define MOST_AT_ONCE 4096 /* entries of a table that stays in the first cache */

/* Several digits at a time: a division by the power of the base is a multiplication by its inverse, which may be too small by one. */
int plures_unpack(const Digits *packed, int threads) {
    (void)threads;
    const uint64_t base = packed->base;
    uint64_t power = base;
    int at_once = 1;
    while (at_once < 4 && power * base <= MOST_AT_ONCE) power *= base, at_once++;
    uint8_t table[MOST_AT_ONCE][4] = {0};
    for (uint64_t number = 0; number < power; number++) {
        uint64_t rest = number;
        for (int place = 0; place < at_once; place++, rest /= base) table[number][place] = (uint8_t)(rest % base);
    }
    const uint64_t inverse = UINT64_MAX / power;
    const int64_t written = packed->per_word + sizeof *table; /* at most, for a word */
    for (int64_t done = 0, word = 0; done < packed->count; done += packed->per_word, word++) {
        const int64_t left = packed->count - done;
        uint8_t last[64 + 2 * sizeof *table], *to = left < written ? last : packed->digits + done;
        uint64_t rest;
        memcpy(&rest, packed->words + word, sizeof rest);
        for (int place = 0; place < packed->per_word; place += at_once) {
            uint64_t quotient = (uint64_t)((unsigned __int128)rest * inverse >> 64), number = rest - quotient * power;
            if (number >= power) number -= power, quotient++;
            memcpy(to + place, table[number], sizeof *table);
            rest = quotient;
        }
        if (to == last) memcpy(packed->digits + done, last, left < packed->per_word ? left : packed->per_word);
    }
    return 0;
}

/* Inlined for each usual size: a copy of so many bytes is then an instruction. */
static inline __attribute__((always_inline)) int place(const Placing *p, size_t size) {
    const char *from[256], *const *ends = p->values + 256;
    char *to = p->weight;
    memcpy(from, p->values, sizeof from);
    for (int64_t row = 0; row < p->rows; row++) {
        const uint8_t *owners = p->owners + row / p->block * p->columns;
        for (int64_t column = 0; column < p->columns; column++, to += size) {
            const uint8_t owner = owners[column];
            const char *value = from[owner];
            if (value == ends[owner]) return 0;
            memcpy(to, value, size);
            from[owner] = value + size;
        }
    }
    return !memcmp(from, ends, sizeof from);
}

/* Returns 1 if each owner has as many values as entries; otherwise nothing beyond them is read. */
int plures_place(const Placing *p) {
    return p->size == 4 ? place(p, 4) : p->size == 36 ? place(p, 36) : place(p, p->size);
}
