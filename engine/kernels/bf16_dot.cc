// bf16_dot: the probe, and kernels of 1 to 6 rows and a panel of 32 columns.
#include "engine/kernels/bf16_dot.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>

#include "engine/kernels/aligned.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "engine/kernels/simd_targets.h"

namespace baton::engine {
namespace {

constexpr int kLanes = 16;

float without_tiny(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

}  // namespace

bool adds_in_order(DotPairs dot) {
  constexpr int kTries = 256;
  alignas(64) uint16_t a[2 * kLanes], b[2 * kLanes];
  alignas(64) float sums[kLanes];
  uint64_t state = 1;
  const auto random = [&] {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state >> 33);
  };
  // Exponents near each other, so that most sums are rounded; then so small that many are tiny.
  for (const uint32_t exponent : {120u, 60u, 0u}) {
    for (int i = 0; i < kTries; ++i) {
      float expected[kLanes];
      for (int lane = 0; lane < kLanes; ++lane) {
        for (int at = 2 * lane; at < 2 * lane + 2; ++at) {
          a[at] = static_cast<uint16_t>((random() & 0x807f) | (exponent + random() % 8) << 7);
          b[at] = static_cast<uint16_t>(
              (random() & 0x807f) | (exponent == 60 ? 64 + random() % 8 : 120 + random() % 8) << 7);
        }
        const uint32_t of_sum = exponent == 60 ? random() % 8 : exponent + random() % 16;
        const uint32_t bits = (random() & 0x7fffff) | of_sum << 23 | (random() & 1) << 31;
        std::memcpy(&sums[lane], &bits, sizeof(bits));
        float sum = without_tiny(sums[lane]);
        for (const int at : {2 * lane + 1, 2 * lane}) {
          sum = without_tiny(std::fma(without_tiny(float_from_bf16(a[at])),
                                      without_tiny(float_from_bf16(b[at])), sum));
        }
        expected[lane] = sum;
      }
      dot(a, b, sums);
      if (std::memcmp(sums, expected, sizeof(sums)) != 0) return false;
    }
  }
  return true;
}

#if defined(__x86_64__)

#define BATON_DOTS __attribute__((target("avx512f,avx512bw,avx512bf16")))
#define BATON_DOTS_INLINE BATON_DOTS __attribute__((always_inline)) inline

namespace {

constexpr int kStrip = 16, kPanel = 32;
constexpr size_t kLineElements = 32;
constexpr size_t kStripStep = kStrip * kLineElements;  // elements of A in a step of 32 k
constexpr size_t kPanelStep = kPanel * kLineElements;  // and of B
// Two sums for each row and vector, two of B and a factor: 27 registers of 32.
constexpr int kMostAtOnce = 6, kVectors = 2;
// Of so many steps a paired panel and a strip of A lie in L1.
constexpr int kStepsAtOnce = 24;
// What few rows ask for ahead: B comes from memory.
constexpr int kStepsAhead = 12;

BATON_DOTS_INLINE __m512 add_dots(__m512 sums, __m512i a, __m512i b) {
  return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}

BATON_DOTS void dot_pairs(const uint16_t* a, const uint16_t* b, float* sums) {
  _mm512_storeu_ps(sums,
                   add_dots(_mm512_loadu_ps(sums), _mm512_loadu_si512(a), _mm512_loadu_si512(b)));
}

std::string_view try_dots() {
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512bf16")) {
    return "the processor has no AVX-512 with bf16";
  }
  return adds_in_order(dot_pairs) ? "" : "the processor's vdpbf16ps adds in another order";
}

// Of k, k + 1 and of k + 2, k + 3, in each lane.
struct Quad {
  __m512i first, second;
};
constexpr __mmask32 kUpper = 0xaaaaaaaa;
constexpr __mmask16 kAll = 0xffff;  // without a mask GCC 12 takes the results for uninitialised

BATON_DOTS_INLINE Quad load_quad(const uint16_t* lines) {
  return {_mm512_loadu_si512(lines), _mm512_loadu_si512(lines + kLineElements)};
}
BATON_DOTS_INLINE __m512i even_of(const Quad& x) {
  return _mm512_mask_blend_epi16(kUpper, x.second, _mm512_maskz_slli_epi32(kAll, x.first, 16));
}
BATON_DOTS_INLINE __m512i odd_of(const Quad& x) {
  return _mm512_mask_blend_epi16(kUpper, _mm512_maskz_srli_epi32(kAll, x.second, 16), x.first);
}

// Tiles [2][16] of lines in which k and k + 1 are pairs become lines of even and of odd k for each
// four k: [8][even 2, odd 2].
BATON_DOTS void pair_panel(const uint16_t* __restrict__ from, int steps,
                           uint16_t* __restrict__ to) {
  for (int step = 0; step < steps; ++step, from += kPanelStep) {
    for (size_t quad = 0; quad < 8; ++quad, to += 4 * kLineElements) {
      const uint16_t* lines = from + quad * 2 * kLineElements;
      __builtin_prefetch(lines + kStepsAhead * kPanelStep, 0, 2);
      const Quad left = load_quad(lines), right = load_quad(lines + kPanelStep / 2);
      _mm512_store_si512(to, even_of(left));
      _mm512_store_si512(to + kLineElements, even_of(right));
      _mm512_store_si512(to + 2 * kLineElements, odd_of(left));
      _mm512_store_si512(to + 3 * kLineElements, odd_of(right));
    }
  }
}

// `kRows` rows of a strip of paired A times one panel, added to sums [kRows][32]. B is paired too,
// or lies as tiles and is on its way from memory, in which `next` comes behind it.
template <int kRows, bool kPaired>
BATON_DOTS __attribute__((noinline)) void multiply_rows(const uint16_t* __restrict__ a,
                                                        const uint16_t* __restrict__ b, int steps,
                                                        const uint16_t* next,
                                                        float* __restrict__ sums) {
  for (int step = 0; step < steps; ++step, a += kStripStep, b += kPanelStep) {
    if constexpr (!kPaired) {
      const int later = step + kStepsAhead;
      const uint16_t* ahead = later < steps
                                  ? b + kStepsAhead * kPanelStep
                                  : next + static_cast<size_t>(later - steps) * kPanelStep;
      for (int line = 0; line < kPanel; ++line) {
        __builtin_prefetch(ahead + static_cast<size_t>(line) * kLineElements, 0, 2);
      }
    }
    __m512 even[kRows][kVectors], odd[kRows][kVectors];
    BATON_UNROLL
    for (int r = 0; r < kRows; ++r) {
      BATON_UNROLL
      for (int v = 0; v < kVectors; ++v) even[r][v] = odd[r][v] = _mm512_setzero_ps();
    }
    for (size_t quad = 0; quad < 8; ++quad) {
      Quad tiles[kVectors];
      __m512i factors[kVectors];
      BATON_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (kPaired) {
          factors[v] = _mm512_load_si512(b + (4 * quad + v) * kLineElements);
        } else {
          tiles[v] = load_quad(b + v * kPanelStep / 2 + quad * 2 * kLineElements);
          factors[v] = even_of(tiles[v]);
        }
      }
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        int32_t pair;
        std::memcpy(&pair, a + r * kLineElements + 2 * quad, sizeof(pair));
        const __m512i factor = _mm512_set1_epi32(pair);
        BATON_UNROLL
        for (int v = 0; v < kVectors; ++v) even[r][v] = add_dots(even[r][v], factor, factors[v]);
      }
      BATON_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        if constexpr (kPaired) {
          factors[v] = _mm512_load_si512(b + (4 * quad + 2 + v) * kLineElements);
        } else {
          factors[v] = odd_of(tiles[v]);
        }
      }
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        int32_t pair;
        std::memcpy(&pair, a + r * kLineElements + 16 + 2 * quad, sizeof(pair));
        const __m512i factor = _mm512_set1_epi32(pair);
        BATON_UNROLL
        for (int v = 0; v < kVectors; ++v) odd[r][v] = add_dots(odd[r][v], factor, factors[v]);
      }
    }
    BATON_UNROLL
    for (int r = 0; r < kRows; ++r) {
      BATON_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        float* at = sums + r * kPanel + v * kLanes;
        _mm512_store_ps(at,
                        _mm512_add_ps(_mm512_load_ps(at), _mm512_add_ps(even[r][v], odd[r][v])));
      }
    }
  }
}

// multiply_rows<rows>(), of at most kMost.
template <bool kPaired, int kMost = kMostAtOnce>
BATON_DOTS void multiply_some(int rows, const uint16_t* a, const uint16_t* b, int steps,
                              const uint16_t* next, float* sums) {
  if constexpr (kMost > 1) {
    if (rows < kMost) return multiply_some<kPaired, kMost - 1>(rows, a, b, steps, next, sums);
  }
  multiply_rows<kMost, kPaired>(a, b, steps, next, sums);
}

// A strip times some steps of a panel. Sums are made in a copy: rows of C may be a power of two
// apart, and then push each other out of L1.
template <bool kPaired>
BATON_DOTS void multiply_strip(const AmxBlock& x, const uint16_t* a, const uint16_t* b, int steps,
                               const uint16_t* next, int row, int column, bool load_c) {
  const int rows = std::min(kStrip, x.rows - row), columns = std::min(kPanel, x.columns - column);
  float* c = x.c + static_cast<size_t>(row) * x.ldc + column;
  alignas(64) float sums[kStrip * kPanel];
  for (int r = 0; r < rows; ++r) {
    float* line = c + static_cast<size_t>(r) * x.ldc;
    float* sum = sums + r * kPanel;
    if (load_c && columns == kPanel) {
      _mm512_store_ps(sum, _mm512_loadu_ps(line));
      _mm512_store_ps(sum + kLanes, _mm512_loadu_ps(line + kLanes));
    } else {
      _mm512_store_ps(sum, _mm512_setzero_ps());
      _mm512_store_ps(sum + kLanes, _mm512_setzero_ps());
      if (load_c) std::copy_n(line, columns, sum);
      asm volatile("prefetchw %0\n\tprefetchw %1" ::"m"(*line), "m"(line[columns - 1]));
    }
  }
  for (int groups = (rows + kMostAtOnce - 1) / kMostAtOnce, r = 0; groups > 0; --groups) {
    const int some = (rows - r + groups - 1) / groups;
    multiply_some<kPaired>(some, a + static_cast<size_t>(r) * kLineElements, b, steps, next,
                           sums + r * kPanel);
    r += some;
  }
  for (int r = 0; r < rows; ++r) {
    float* line = c + static_cast<size_t>(r) * x.ldc;
    const float* sum = sums + r * kPanel;
    if (columns == kPanel) {
      _mm512_storeu_ps(line, _mm512_load_ps(sum));
      _mm512_storeu_ps(line + kLanes, _mm512_load_ps(sum + kLanes));
    } else {
      std::copy_n(sum, columns, line);
    }
  }
}

BATON_DOTS double run_registers(int64_t iterations) {
  constexpr int kChains = 12;
  __m512 sums[kChains];
  BATON_UNROLL
  for (int i = 0; i < kChains; ++i) sums[i] = _mm512_set1_ps(static_cast<float>(i));
  // Zeros would draw less power, and run faster than numbers do.
  __m512i a = _mm512_set1_epi32(0x3f013f05), b = _mm512_set1_epi32(0x3a01bc03);
  for (int64_t n = 0; n < iterations; ++n) {
    BATON_UNROLL
    for (int i = 0; i < kChains; ++i) sums[i] = add_dots(sums[i], a, b);
    asm volatile("" : "+v"(a), "+v"(b));
  }
  BATON_UNROLL
  for (int i = 1; i < kChains; ++i) sums[0] = _mm512_add_ps(sums[0], sums[i]);
  asm volatile("" ::"v"(sums[0]));
  return 4.0 * kLanes * kChains * static_cast<double>(iterations);
}

}  // namespace

std::string_view why_no_dots() {
  static const std::string_view why = try_dots();
  return why;
}

BATON_DOTS void pair_for_dots(uint16_t* lines, size_t count) {
  alignas(64) uint16_t places[kLineElements];
  for (uint16_t i = 0; i < kLineElements; ++i) {
    // Word `word` of a half: the lower place is that of k + 2.
    const uint16_t word = i / 2 % 8, odd = i / 16;
    places[i] = static_cast<uint16_t>(4 * word + odd + (i % 2 == 0 ? 2 : 0));
  }
  const __m512i order = _mm512_load_si512(places);
  for (; count > 0; --count, lines += kLineElements) {
    _mm512_storeu_si512(
        lines, _mm512_maskz_permutexvar_epi16(~__mmask32{0}, order, _mm512_loadu_si512(lines)));
  }
}

BATON_DOTS void multiply_dots(const AmxBlock& x) {
  const size_t panel_elements = static_cast<size_t>(x.steps) * kPanelStep;
  if (x.rows <= kMostAtOnce) {
    for (int column = 0; column < x.columns; column += kPanel) {
      const uint16_t* b = x.b + static_cast<size_t>(column / kPanel) * panel_elements;
      multiply_strip<false>(x, x.a, b, x.steps, b + panel_elements, 0, column, x.accumulate);
    }
    return;
  }
  alignas(64) uint16_t paired[kStepsAtOnce * kPanelStep];
  const int pieces = (x.steps + kStepsAtOnce - 1) / kStepsAtOnce;
  for (int i = 0; i < pieces; ++i) {
    const int step = x.steps * i / pieces, steps = x.steps * (i + 1) / pieces - step;
    for (int column = 0; column < x.columns; column += kPanel) {
      pair_panel(x.b + static_cast<size_t>(column / kPanel) * panel_elements +
                     static_cast<size_t>(step) * kPanelStep,
                 steps, paired);
      for (int row = 0; row < x.rows; row += kStrip) {
        multiply_strip<true>(x,
                             x.a + static_cast<size_t>(row / kStrip) * x.a_strip +
                                 static_cast<size_t>(step) * kStripStep,
                             paired, steps, nullptr, row, column, x.accumulate || i > 0);
      }
    }
  }
}

double measure_dot_peak(ComputePool& pool, int64_t iterations) {
  std::atomic<double> operations{0.0};
  const auto start = std::chrono::steady_clock::now();
  pool.parallel_for(pool.size(),
                    [&](int64_t, int) { operations.fetch_add(run_registers(iterations)); });
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  return operations.load() / seconds.count();
}

#else

std::string_view why_no_dots() { return "the processor is not an x86-64 one"; }
void pair_for_dots(uint16_t*, size_t) {}
void multiply_dots(const AmxBlock&) {}
double measure_dot_peak(ComputePool&, int64_t) { return 0; }

#endif

bool dots_usable() { return why_no_dots().empty(); }

}  // namespace baton::engine
