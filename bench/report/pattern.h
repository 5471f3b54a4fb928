// Bytes that can be checked: a pattern that depends on a seed and on the position in the transfer.
#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "transport/layout.h"

namespace baton::bench {

// Writes the pattern into the layout: byte i of the transfer gets the same value wherever it lies.
void fill(std::byte* base, const Layout& layout, uint64_t seed);

// Makes every byte of the memory wrong.
void poison(std::byte* base, size_t size);

// Checks every byte of [base, base + size): those of the layout hold the pattern, and the others
// are as poison() left them. DataLoss names the first byte that is wrong. Poisons what it checked.
absl::Status check(std::byte* base, size_t size, const Layout& layout, uint64_t seed);

}  // namespace baton::bench
