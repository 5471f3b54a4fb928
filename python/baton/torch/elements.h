// Maps torch's types and reductions to Baton's, and rejects those that Baton cannot reduce.
#pragma once

#include <baton/collectives.h>

#include <cmath>

#include <torch/csrc/distributed/c10d/Types.hpp>

namespace baton::c10d_backend {

// For calls that only move data: `each` elements of `type` make one of the tensor's.
struct Moved {
  int32_t type;
  size_t each;
};

inline Moved moved(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return {BATON_F32, 1};
    case at::kHalf:
      return {BATON_F16, 1};
    case at::kBFloat16:
      return {BATON_BF16, 1};
    case at::kDouble:
      return {BATON_F64, 1};
    case at::kChar:
      return {BATON_I8, 1};
    case at::kInt:
      return {BATON_I32, 1};
    case at::kLong:
      return {BATON_I64, 1};
    case at::kComplexFloat:
      return {BATON_F32, 2};
    case at::kComplexDouble:
      return {BATON_F64, 2};
    default:
      return {BATON_U8, c10::elementSize(type)};
  }
}

// Of a call that reduces tensors of one type. `as`: the type that they are summed in.
struct Reduced {
  int32_t type;
  int32_t op;
  size_t each;
  at::ScalarType as;
  at::Tensor factor;  // of a pre-multiplied sum: one element
};

// torch's reductions, by number.
struct NamedOp {
  const char* name;
  int32_t op;
};
constexpr NamedOp kOps[] = {
    {"SUM", BATON_SUM}, {"AVG", BATON_AVG},  {"PRODUCT", BATON_PROD},
    {"MIN", BATON_MIN}, {"MAX", BATON_MAX},  {"BAND", BATON_AND},
    {"BOR", BATON_OR},  {"BXOR", BATON_XOR}, {"PREMUL_SUM", BATON_PREMUL_SUM},
};

inline Reduced reduced(at::ScalarType type, const ::c10d::ReduceOp& op) {
  using Op = ::c10d::ReduceOp;
  const bool known = op.op_ < std::size(kOps);
  const auto refuse = [&](const char* instead) {
    TORCH_CHECK(false, "backend baton cannot reduce ", c10::toString(type), " with ReduceOp.",
                known ? kOps[op.op_].name : "UNUSED", ": ", instead);
  };
  if (!known) refuse("it has SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR and PREMUL_SUM");
  Reduced out{0, kOps[op.op_].op, 1, type, {}};
  const bool bits = op == Op::BAND || op == Op::BOR || op == Op::BXOR;
  switch (type) {
    case at::kByte:
      out.type = BATON_U8;
      break;
    case at::kUInt32:
      out.type = BATON_U32;
      break;
    case at::kUInt64:
      out.type = BATON_U64;
      break;
    case at::kFloat8_e4m3fn:
      out.type = BATON_F8E4M3;
      break;
    case at::kFloat8_e5m2:
      out.type = BATON_F8E5M2;
      break;
    case at::kShort:
    case at::kUInt16:  // sums that wrap do so alike
      out.type = BATON_I32;
      out.as = at::kInt;
      break;
    case at::kBool:  // 0 and 1: a sum is an or, a product an and
      out.type = BATON_U8;
      if (op == Op::SUM || op == Op::BOR) out.op = BATON_MAX;
      if (op == Op::PRODUCT || op == Op::BAND) out.op = BATON_MIN;
      if (op == Op::AVG || op == Op::PREMUL_SUM) refuse("truth values have no fractions");
      break;
    case at::kComplexFloat:
    case at::kComplexDouble:
      if (!::c10d::isComplexViewAsRealAllowed(op)) refuse("complex numbers have sums alone");
      [[fallthrough]];
    default: {
      const Moved plain = moved(type);
      if (plain.type == BATON_U8) refuse("cast the tensor to a type of 32 or 64 bits first");
      out.type = plain.type;
      out.each = plain.each;
    }
  }
  if (bits && !c10::isIntegralType(type, true)) {
    refuse("a reduction of bits needs integers or truth values");
  }
  if (op == Op::PREMUL_SUM) {
    const auto* by = static_cast<const ::c10d::PreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK(by != nullptr, "ReduceOp.PREMUL_SUM has no factor: make it with ",
                "torch.distributed._make_nccl_premul_sum(factor)");
    at::Tensor given = by->tensor_factor.defined()
                           ? by->tensor_factor.detach().to(at::kCPU).reshape({1})
                           : at::full({1}, by->double_factor, at::kDouble);
    if (given.is_complex()) {
      if (at::imag(given).item<double>() != 0) refuse("its factor must be a real number");
      given = at::real(given);
    }
    // In the type that is summed, of which Baton reads one element.
    out.factor = given.to(c10::toRealValueType(out.as)).contiguous();
    const auto value = given.item<double>(), held = out.factor.item<double>();
    const bool holds = c10::isIntegralType(out.as, false)
                           ? at::equal(out.factor.to(given.scalar_type()), given)
                           : std::isfinite(held) || !std::isfinite(value);
    if (!holds) refuse(c10::str("this type cannot hold the factor ", value).c_str());
  }
  return out;
}

}  // namespace baton::c10d_backend
