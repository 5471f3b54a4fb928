// Inputs for collectives whose results are known exactly, and the check of every element.
//
// A value depends on the rank, its index, the call and the size, so a missing, repeated, misplaced
// or stale contribution shows. What is combined is chosen so that every order of combining, with
// rounding to the type after each step, gives the same bits: floats are small multiples of a power
// of two whose sum stays within the significand, or powers of two times one odd factor (prod). The
// factors of premulsum are 2 and -2, of integers any.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bench/nccl_tests/measured.h"

namespace baton::bench {

struct CollectiveCase {
  Measured collective = Measured::kAllReduce;
  DataType type = DataType::kF32;
  ReduceOp op = ReduceOp::kSum;
  int ranks = 1;
  int root = 0;
  uint64_t call = 0;  // other values for other calls
};

// Writes the input of `rank`: elements [0, count) of its input vector.
void fill_input(const CollectiveCase& the_case, int rank, void* input, size_t count);

// Writes the factor of `rank` in a premulsum, one element.
void fill_factor(const CollectiveCase& the_case, int rank, void* factor);

// How many elements of an input are no longer what fill_input() wrote.
uint64_t count_changed(const CollectiveCase& the_case, int rank, const void* input, size_t count);

// How many elements of the output of `rank` are wrong; `count` is the call's argument. 0 where the
// rank has no output (reduce and gather, not the root). Send and receive: from the rank before.
uint64_t count_wrong(const CollectiveCase& the_case, int rank, const void* output, size_t count);

}  // namespace baton::bench
