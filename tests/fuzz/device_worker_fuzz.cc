// worker_fuzz.cc over memory of a device, which no processor can touch: whatever peers say of it,
// and of theirs, it is copied by the driver alone, within its bounds and by its rules.
#define BATON_FUZZ_DEVICE
#include "tests/fuzz/worker_fuzz.cc"
