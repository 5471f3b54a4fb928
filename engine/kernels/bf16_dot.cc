// bf16_dot: the probe, and kernels of 1 to 6 rows and a panel of 32 columns.
#include "engine/kernels/bf16_dot.h"

#include <algorithm>
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
      const void *const is = sums, *const right = expected;  // to the bit: -0 is not 0
      if (std::memcmp(is, right, sizeof(sums)) != 0) return false;
    }
  }
  return true;
}

#if defined(__x86_64__)

#define BATON_DOTS __attribute__((target("avx512f,avx512bw,avx512bf16")))
#define BATON_DOTS_INLINE BATON_DOTS __attribute__((always_inline)) inline

namespace {

constexpr int kStrip = 16, kPanel = 32;
constexpr size_t kDotLine = 32;
constexpr size_t kStripStep = kStrip * kDotLine;  // elements of A in a step of 32 k
constexpr size_t kPanelStep = kPanel * kDotLine;  // and of B
// Two sums for each row and vector, two of B and a factor: 27 registers of 32.
constexpr int kMostAtOnce = 6;
// One vector at a time: two sums for each row.
constexpr int kMostStreamed = 8;
// A paired panel of this many steps fits in L2, and C is loaded and stored once for all of them.
constexpr int kPairedSteps = 24;
// For B, which comes from memory. Few rows read so fast that the processor's own prefetching is
// best.
constexpr int kLinesAhead = 256, kRowsThatAsk = 5;

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

// Products of k, k + 1 and of k + 2, k + 3, in each lane.
struct Quad {
  __m512i first, second;
};
constexpr __mmask32 kUpper = 0xaaaaaaaa;
constexpr __mmask16 kAll = 0xffff;  // without a mask GCC 12 takes the results for uninitialised

BATON_DOTS_INLINE Quad load_quad(const uint16_t* lines) {
  return {_mm512_loadu_si512(lines), _mm512_loadu_si512(lines + kDotLine)};
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
    for (size_t quad = 0; quad < 8; ++quad, to += 4 * kDotLine) {
      const uint16_t* lines = from + quad * 2 * kDotLine;
      for (const size_t line : {size_t{0}, kDotLine, kPanelStep / 2, kPanelStep / 2 + kDotLine}) {
        __builtin_prefetch(lines + kLinesAhead * kDotLine + line, 0, 2);
      }
      const Quad left = load_quad(lines), right = load_quad(lines + kPanelStep / 2);
      _mm512_store_si512(to, even_of(left));
      _mm512_store_si512(to + kDotLine, even_of(right));
      _mm512_store_si512(to + 2 * kDotLine, odd_of(left));
      _mm512_store_si512(to + 3 * kDotLine, odd_of(right));
    }
  }
}

// One row and vector: sums of the even k of a step and of its odd k.
struct Sums {
  __m512 even, odd;
};

// `pairs` of four k: those of even k, or eight behind them of odd k.
BATON_DOTS_INLINE __m512i factor_of(const uint16_t* pairs) {
  int32_t pair;
  std::memcpy(&pair, pairs, sizeof(pair));
  return _mm512_set1_epi32(pair);
}

BATON_DOTS_INLINE void add_sums(const Sums& x, float* at) {
  _mm512_store_ps(at, _mm512_add_ps(_mm512_load_ps(at), _mm512_add_ps(x.even, x.odd)));
}

// Sums [kRows][32] += so many rows of a strip times some steps of a panel that is paired. The same
// rows of the next strip, so many elements on, come into L2 meanwhile.
template <int kRows>
BATON_DOTS __attribute__((noinline)) void multiply_paired(const uint16_t* __restrict__ a,
                                                          const uint16_t* __restrict__ b, int steps,
                                                          size_t next_strip,
                                                          float* __restrict__ sums) {
  constexpr int kVectors = 2;
  for (int step = 0; step < steps; ++step, a += kStripStep) {
    Sums of[kRows][kVectors];
    BATON_UNROLL
    for (int r = 0; r < kRows; ++r) {
      __builtin_prefetch(a + next_strip + r * kDotLine, 0, 2);
      BATON_UNROLL
      for (int v = 0; v < kVectors; ++v) of[r][v] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    }
    for (size_t quad = 0; quad < 8; ++quad, b += 4 * kDotLine) {
      // First the even k, then the odd: so only one half of B is in registers.
      __m512i half[kVectors];
      BATON_UNROLL
      for (int v = 0; v < kVectors; ++v) half[v] = _mm512_load_si512(b + v * kDotLine);
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const __m512i factor = factor_of(a + r * kDotLine + 2 * quad);
        BATON_UNROLL
        for (int v = 0; v < kVectors; ++v) of[r][v].even = add_dots(of[r][v].even, factor, half[v]);
      }
      BATON_UNROLL
      for (int v = 0; v < kVectors; ++v) half[v] = _mm512_load_si512(b + (2 + v) * kDotLine);
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const __m512i factor = factor_of(a + r * kDotLine + 16 + 2 * quad);
        BATON_UNROLL
        for (int v = 0; v < kVectors; ++v) of[r][v].odd = add_dots(of[r][v].odd, factor, half[v]);
      }
    }
    BATON_UNROLL
    for (int r = 0; r < kRows; ++r) {
      BATON_UNROLL
      for (int v = 0; v < kVectors; ++v) add_sums(of[r][v], sums + r * kPanel + v * kLanes);
    }
  }
}

// The same with a panel as it lies in memory, which is read once and in order.
template <int kRows>
BATON_DOTS __attribute__((noinline)) void multiply_stream(const uint16_t* __restrict__ a,
                                                          const uint16_t* __restrict__ b, int steps,
                                                          float* __restrict__ sums) {
  for (int step = 0; step < steps; ++step, a += kStripStep) {
    for (int first = 0; first < kPanel; first += kLanes) {
      Sums of[kRows];
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) of[r] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
      for (size_t quad = 0; quad < 8; ++quad, b += 2 * kDotLine) {
        if constexpr (kRows >= kRowsThatAsk) {
          __builtin_prefetch(b + kLinesAhead * kDotLine, 0, 2);
          __builtin_prefetch(b + (kLinesAhead + 1) * kDotLine, 0, 2);
        }
        const Quad lines = load_quad(b);
        const __m512i even = even_of(lines), odd = odd_of(lines);
        BATON_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const uint16_t* pairs = a + r * kDotLine + 2 * quad;
          of[r].even = add_dots(of[r].even, factor_of(pairs), even);
          of[r].odd = add_dots(of[r].odd, factor_of(pairs + 16), odd);
        }
      }
      BATON_UNROLL
      for (int r = 0; r < kRows; ++r) add_sums(of[r], sums + r * kPanel + first);
    }
  }
}

// multiply_paired<rows>() or multiply_stream<rows>(), of at most kMost.
template <bool kPaired, int kMost>
BATON_DOTS void multiply_some(int rows, const uint16_t* a, const uint16_t* b, int steps,
                              size_t next_strip, float* sums) {
  if constexpr (kMost > 1) {
    if (rows < kMost) return multiply_some<kPaired, kMost - 1>(rows, a, b, steps, next_strip, sums);
  }
  if constexpr (kPaired) {
    multiply_paired<kMost>(a, b, steps, next_strip, sums);
  } else {
    multiply_stream<kMost>(a, b, steps, sums);
  }
}

// A strip, in groups of rows that are alike.
template <bool kPaired, int kMost>
BATON_DOTS void multiply_strip(int rows, const uint16_t* a, const uint16_t* b, int steps,
                               size_t next_strip, float* sums) {
  for (int groups = (rows + kMost - 1) / kMost; groups > 0; --groups) {
    const int some = (rows + groups - 1) / groups;
    multiply_some<kPaired, kMost>(some, a, b, steps, next_strip, sums);
    a += static_cast<size_t>(some) * kDotLine;
    sums += some * kPanel;
    rows -= some;
  }
}

// Sums are made in a copy of some rows and whole panels of C: its rows may be a power of two apart,
// and then push each other out of L1.
struct Copy {
  float* c;
  size_t ldc;
  int rows, columns;  // of C; the copy has all columns of its panels
};

BATON_DOTS void take(const Copy& x, bool load_c, float* sums) {
  for (int r = 0; r < x.rows; ++r, sums += kPanel) {
    float* line = x.c + static_cast<size_t>(r) * x.ldc;
    if (load_c && x.columns == kPanel) {
      BATON_UNROLL
      for (int at = 0; at < kPanel; at += kLanes) {
        _mm512_store_ps(sums + at, _mm512_loadu_ps(line + at));
      }
      continue;
    }
    BATON_UNROLL
    for (int at = 0; at < kPanel; at += kLanes) {
      _mm512_store_ps(sums + at, _mm512_setzero_ps());
    }
    if (load_c) std::copy_n(line, x.columns, sums);
    for (int at = 0; at < x.columns; at += kLanes) asm volatile("prefetchw %0" ::"m"(line[at]));
  }
}

BATON_DOTS void put(const float* sums, const Copy& x) {
  for (int r = 0; r < x.rows; ++r, sums += kPanel) {
    float* line = x.c + static_cast<size_t>(r) * x.ldc;
    if (x.columns < kPanel) {
      std::copy_n(sums, x.columns, line);
      continue;
    }
    BATON_UNROLL
    for (int at = 0; at < kPanel; at += kLanes) {
      _mm512_storeu_ps(line + at, _mm512_load_ps(sums + at));
    }
  }
}

}  // namespace

std::string_view why_no_dots() {
  static const std::string_view why = try_dots();
  return why;
}

BATON_DOTS void pair_for_dots(uint16_t* tiles, int count, int rows) {
  alignas(64) uint16_t places[kDotLine];
  for (uint16_t i = 0; i < kDotLine; ++i) {
    // Word `word` of a half: the lower place is that of k + 2.
    const uint16_t word = i / 2 % 8, odd = i / 16;
    places[i] = static_cast<uint16_t>(4 * word + odd + (i % 2 == 0 ? 2 : 0));
  }
  const __m512i order = _mm512_load_si512(places);
  for (; count > 0; --count, tiles += kStripStep) {
    for (int row = 0; row < rows; ++row) {
      uint16_t* line = tiles + static_cast<size_t>(row) * kDotLine;
      _mm512_storeu_si512(
          line, _mm512_maskz_permutexvar_epi16(~__mmask32{0}, order, _mm512_loadu_si512(line)));
    }
  }
}

BATON_DOTS void multiply_dots(const AmxBlock& x) {
  alignas(64) uint16_t paired[kPairedSteps * kPanelStep];
  alignas(64) float sums[kStrip * kPanel];
  const size_t panel = static_cast<size_t>(x.steps) * kPanelStep;
  const bool few = x.rows <= kStrip;
  const int at_once = few ? x.steps : kPairedSteps;
  const int pieces = (x.steps + at_once - 1) / at_once;
  for (int i = 0; i < pieces; ++i) {
    const int step = x.steps * i / pieces, steps = x.steps * (i + 1) / pieces - step;
    const uint16_t* b = x.b + static_cast<size_t>(step) * kPanelStep;
    for (int column = 0; column < x.columns; column += kPanel, b += panel) {
      if (!few) pair_panel(b, steps, paired);
      for (int row = 0; row < x.rows; row += kStrip) {
        const Copy copy = {x.c + static_cast<size_t>(row) * x.ldc + column, x.ldc,
                           std::min(kStrip, x.rows - row), std::min(kPanel, x.columns - column)};
        const uint16_t* a = x.a + static_cast<size_t>(row / kStrip) * x.a_strip +
                            static_cast<size_t>(step) * kStripStep;
        const size_t next = row + kStrip < x.rows ? x.a_strip : 0;
        take(copy, x.accumulate || i > 0, sums);
        if (few) {
          multiply_strip<false, kMostStreamed>(copy.rows, a, b, steps, 0, sums);
        } else {
          multiply_strip<true, kMostAtOnce>(copy.rows, a, paired, steps, next, sums);
        }
        put(sums, copy);
      }
    }
  }
}

#else

std::string_view why_no_dots() { return "the processor is not an x86-64 one"; }
void pair_for_dots(uint16_t*, int, int) {}
void multiply_dots(const AmxBlock&) {}

#endif

bool dots_usable() { return why_no_dots().empty(); }

}  // namespace baton::engine
