// Reads --device, and puts a model on what it names.
#include "engine/device/open_device.h"

#include <cstdlib>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "engine/device/device_model.h"
#include "gpudirect/driver.h"

namespace baton::engine::device {

absl::StatusOr<std::optional<int>> parse_device(std::string_view text) {
  if (text == "cpu") return std::nullopt;
  if (text == "cuda") return 0;
  absl::string_view number(text.data(), text.size());
  int ordinal = 0;
  // As it would be written, to the letter: SimpleAtoi() takes spaces, signs and zeros as well.
  if (absl::ConsumePrefix(&number, "cuda:") && absl::SimpleAtoi(number, &ordinal) && ordinal >= 0 &&
      ordinal < 1024 && absl::StrCat(ordinal) == number) {
    return ordinal;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", absl::Utf8SafeCEscape(std::string(text)),
      "\" is not a device: write cpu, cuda, or cuda: with a device's number behind it, as "
      "in cuda:1"));
}

absl::StatusOr<std::unique_ptr<ModelRunner>> run_on_device(int ordinal,
                                                           const Checkpoint& checkpoint,
                                                           Arithmetic arithmetic) {
  const auto failed = [&](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat("--device cuda:", ordinal, ": ",
                                                    status.message(), "; --device cpu needs none"));
  };
  const absl::StatusOr<const gpudirect::Driver*> driver = gpudirect::machine_driver();
  if (!driver.ok()) return failed(driver.status());
  absl::StatusOr<std::unique_ptr<Gpu>> gpu = Gpu::open(**driver, ordinal);
  if (!gpu.ok()) return failed(gpu.status());
  absl::StatusOr<const gpudirect::CublasLt*> blas = absl::UnavailableError("it is not needed");
  if (arithmetic == Arithmetic::kBf16) blas = gpudirect::machine_cublaslt();
  auto model = DeviceModel::create(*std::move(gpu), checkpoint, arithmetic, blas);
  if (!model.ok()) return failed(model.status());
  const char* const graphs = std::getenv("BATON_CUDA_GRAPHS");
  const std::string_view wanted = graphs != nullptr ? graphs : "yes";
  if (wanted != "yes" && wanted != "no") {
    return absl::InvalidArgumentError(
        absl::StrCat("BATON_CUDA_GRAPHS is \"", graphs, "\": write yes or no"));
  }
  (*model)->use_graphs(wanted == "yes");
  return *std::move(model);
}

}  // namespace baton::engine::device
