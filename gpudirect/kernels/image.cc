// The image that nvcc has made, put into the program by the assembler.
#include "gpudirect/kernels/image.h"

#ifdef BATON_KERNEL_IMAGE
// NOLINTNEXTLINE(hicpp-no-assembler): there is no other way that every compiler of ours knows.
__asm__(
    ".section .rodata\n"
    ".balign 64\n"
    ".globl baton_kernel_image\n"
    ".globl baton_kernel_image_end\n"
    "baton_kernel_image:\n"
    ".incbin \"" BATON_KERNEL_IMAGE
    "\"\n"
    "baton_kernel_image_end:\n"
    ".byte 0\n"
    ".previous\n");
extern "C" const std::byte baton_kernel_image[];
extern "C" const std::byte baton_kernel_image_end[];
#endif

namespace baton::gpudirect::kernels {

absl::Span<const std::byte> image() {
#ifdef BATON_KERNEL_IMAGE
  return {baton_kernel_image, static_cast<size_t>(baton_kernel_image_end - baton_kernel_image)};
#else
  return {};
#endif
}

}  // namespace baton::gpudirect::kernels
