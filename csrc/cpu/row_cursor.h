// Walks the rows of a layout one after the other without a division. No torch here.

#pragma once

#include <cstdint>

#include "row_layout.h"

namespace sms_plugin {

class RowCursor {
 public:
  RowCursor(const RowLayout& layout, int64_t row) : layout_(layout) {
    for (int d = 0; d < layout.dims; ++d) {
      index_[d] = row % layout.sizes[d];
      row /= layout.sizes[d];
      for (int k = 0; k < kMaxOperands; ++k) offsets_[k] += index_[d] * layout.strides[k][d];
    }
  }

  // First element of the row in an operand.
  int64_t offset(int operand) const { return offsets_[operand]; }

  // Position along the innermost row dimension.
  int64_t innermost() const { return index_[0]; }

  void advance() {
    for (int d = 0; d < layout_.dims; ++d) {
      const bool carries = ++index_[d] == layout_.sizes[d];
      const int64_t steps = carries ? 1 - layout_.sizes[d] : 1;
      for (int k = 0; k < kMaxOperands; ++k) offsets_[k] += steps * layout_.strides[k][d];
      if (!carries) return;
      index_[d] = 0;
    }
  }

 private:
  const RowLayout& layout_;
  int64_t index_[kMaxRowDims] = {};     // [layout.dims]
  int64_t offsets_[kMaxOperands] = {};  // elements
};

}  // namespace sms_plugin
