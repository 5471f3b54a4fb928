// The kernels as this program has them: an image for the driver to load, made by nvcc when Baton
// was built.
#pragma once

#include <cstddef>

#include "absl/types/span.h"

namespace baton::gpudirect::kernels {

// Machine code for compute capabilities 8.0 and 9.0, and PTX of which the driver makes code for
// newer devices. Empty where Baton was built without nvcc.
absl::Span<const std::byte> image();

}  // namespace baton::gpudirect::kernels
