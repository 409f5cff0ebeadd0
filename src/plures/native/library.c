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
                             sizeof(Digits), sizeof(Placing), sizeof(Message)};
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
    if (layer->lanes != 1 && layer->lanes != kernels->lanes && !kernels->joins_halves(layer)) kernels = plures_kernels("avx2");
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

/* ---- SHA-256 of two messages at a time: the instructions of one message wait for each other ---- */

#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>

#define WITH_SHA __attribute__((target("sha,sse4.1")))

static const uint32_t round_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

/* A message in progress: its label with the first bytes, the blocks between, and the last bytes with the padding. */
typedef struct {
    __m128i abef, cdgh;
    const uint8_t *at[3];
    int64_t blocks[3];
    int part;
    uint8_t head[64], tail[128];
} Stream;

static inline WITH_SHA __attribute__((always_inline)) void rounds(Stream *const *streams, const int count, int64_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef[2], cdgh[2], abef_before[2], cdgh_before[2], words[2][4];
    const uint8_t *at[2];
    for (int s = 0; s < count; s++) abef[s] = streams[s]->abef, cdgh[s] = streams[s]->cdgh, at[s] = streams[s]->at[streams[s]->part];
    for (; blocks > 0; blocks--) {
        for (int s = 0; s < count; s++, at[s - 1] += 64) {
            abef_before[s] = abef[s], cdgh_before[s] = cdgh[s];
            for (int i = 0; i < 4; i++) words[s][i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)at[s] + i), big_endian);
        }
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            for (int s = 0; s < count; s++) {
                __m128i *w = words[s], last = w[(i + 3) % 4];
                const __m128i x = _mm_add_epi32(w[i % 4], _mm_loadu_si128((const __m128i *)round_constants + i));
                cdgh[s] = _mm_sha256rnds2_epu32(cdgh[s], abef[s], x);
                abef[s] = _mm_sha256rnds2_epu32(abef[s], cdgh[s], _mm_shuffle_epi32(x, 0x0e));
                const __m128i next = _mm_add_epi32(_mm_sha256msg1_epu32(w[i % 4], w[(i + 1) % 4]), _mm_alignr_epi8(last, w[(i + 2) % 4], 4));
                if (i < 12) w[i % 4] = _mm_sha256msg2_epu32(next, last);
            }
        for (int s = 0; s < count; s++) abef[s] = _mm_add_epi32(abef[s], abef_before[s]), cdgh[s] = _mm_add_epi32(cdgh[s], cdgh_before[s]);
    }
    for (int s = 0; s < count; s++) streams[s]->abef = abef[s], streams[s]->cdgh = cdgh[s], streams[s]->at[streams[s]->part] = at[s];
}

static WITH_SHA void rounds_of_one(Stream *one, int64_t blocks) { rounds(&one, 1, blocks); }
static WITH_SHA void rounds_of_two(Stream *one, Stream *other, int64_t blocks) { rounds((Stream *const[]){one, other}, 2, blocks); }

static void begin(Stream *s, const Message *message) {
    const int64_t label = strlen(message->label), whole = label + message->bytes;
    const int64_t first = whole < 64 ? 0 : 64 - label, between = whole < 64 ? 0 : (whole - 64) / 64;
    *s = (Stream){.abef = _mm_set_epi32(0x6a09e667, 0xbb67ae85, 0x510e527f, 0x9b05688c),
                  .cdgh = _mm_set_epi32(0x3c6ef372, 0xa54ff53a, 0x1f83d9ab, 0x5be0cd19)};
    int64_t rest = whole % 64;
    if (first) {
        memcpy(s->head, message->label, label);
        memcpy(s->head + label, message->data, first);
        memcpy(s->tail, message->data + message->bytes - rest, rest);
    } else {
        memcpy(s->tail, message->label, label);
        if (message->bytes) memcpy(s->tail + label, message->data, message->bytes);
    }
    s->at[0] = s->head, s->at[1] = message->data + first, s->at[2] = s->tail;
    s->blocks[0] = first > 0, s->blocks[1] = between, s->blocks[2] = rest < 56 ? 1 : 2;
    s->tail[rest] = 0x80;
    for (int i = 0; i < 8; i++) s->tail[s->blocks[2] * 64 - 1 - i] = (uint8_t)((uint64_t)whole * 8 >> 8 * i);
}

static int64_t blocks_ahead(Stream *s) {
    while (s->part < 2 && !s->blocks[s->part]) s->part++;
    return s->blocks[s->part];
}

static WITH_SHA void end(const Stream *s, Message *message) {
    uint32_t high[4], low[4];
    _mm_storeu_si128((__m128i *)high, s->abef);
    _mm_storeu_si128((__m128i *)low, s->cdgh);
    const uint32_t state[8] = {high[3], high[2], low[3], low[2], high[1], high[0], low[1], low[0]};
    for (int i = 0; i < 32; i++) message->digest[i] = (uint8_t)(state[i / 4] >> (24 - 8 * (i % 4)));
}

typedef struct {
    Message *messages;
    int64_t count;
    atomic_llong next;
} Batch;

/* Two messages side by side, until there are no more: one that has ended makes way for the next. */
static void digest_item(const Job *job, int64_t item, void *scratch) {
    (void)item, (void)scratch;
    Batch *batch = (Batch *)job->layer;
    Stream streams[2];
    Message *of[2] = {NULL, NULL};
    for (;;) {
        for (int s = 0; s < 2; s++) {
            const int64_t next = of[s] ? 0 : atomic_fetch_add(&batch->next, 1);
            if (!of[s] && next < batch->count) begin(&streams[s], of[s] = batch->messages + next);
        }
        if (!of[0] && !of[1]) return;
        const int64_t ahead[2] = {of[0] ? blocks_ahead(&streams[0]) : INT64_MAX, of[1] ? blocks_ahead(&streams[1]) : INT64_MAX};
        const int64_t blocks = ahead[0] < ahead[1] ? ahead[0] : ahead[1];
        if (of[0] && of[1]) rounds_of_two(&streams[0], &streams[1], blocks);
        else rounds_of_one(&streams[of[1] != NULL], blocks);
        for (int s = 0; s < 2; s++)
            if (of[s] && !(streams[s].blocks[streams[s].part] -= blocks) && streams[s].part == 2) end(&streams[s], of[s]), of[s] = NULL;
    }
}

static int has_sha(void) {
    unsigned a, b = 0, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1 && __builtin_cpu_supports("sse4.1");
}
#endif

/* Returns 1 if it did nothing, because this CPU has no instructions for it, or a label is too long. */
int plures_digests(Message *messages, int count, int threads) {
#ifdef __x86_64__
    for (int i = 0; i < count; i++)
        if (strlen(messages[i].label) > 63) return 1;
    if (!has_sha()) return 1;
    Batch batch = {.messages = messages, .count = count};
    Job job = {.layer = &batch, .item = digest_item, .items = threads, .threads = threads};
    return share(&job);
#else
    (void)messages, (void)count, (void)threads;
    return 1;
#endif
}
