//! The arithmetic of remote atomics, on the target's memory.
//!
//! Pure apart from that memory: operands and results come as bytes, in the machine's own order and
//! at any alignment. Which operation exists for which type is asked of the same code that does it,
//! so the two cannot disagree. All atomics of this process exclude each other, whichever endpoint
//! they came in by; plain loads and stores of the program are not excluded (libfabric's contract).

use crate::abi::*;
use crate::engine::request::AtomicKind;
use crate::info::INJECT_SIZE;
use crate::sync::SpinLock;

/// The most bytes one call changes: what fits an inject, so that every atomic may be one.
pub const BYTES_MAX: usize = INJECT_SIZE;

static SERIAL: SpinLock<()> = SpinLock::new(());

/// Bytes of one element; `None`: not a type we know.
pub fn element_bytes(datatype: u32) -> Option<usize> {
    dispatch(datatype, Size)
}

/// Whether `op` on `datatype` is offered in calls of this kind.
pub fn supports(kind: AtomicKind, datatype: u32, op: u32) -> bool {
    let fits = match kind {
        AtomicKind::Update => op <= OP_BXOR || op == OP_WRITE,
        AtomicKind::Fetch => op <= OP_WRITE,
        AtomicKind::Compare => (OP_CSWAP..=OP_MSWAP).contains(&op),
    };
    fits && dispatch(datatype, Probe { op }).unwrap_or(false)
}

/// Applies `op` to `count` elements at `target`. `result`, if not empty, gets the values found
/// there before. `operand` is empty for FI_ATOMIC_READ, `compare` for all but the swaps.
///
/// # Safety
/// `target` points to `count` elements of memory that may be read and written.
pub unsafe fn apply(
    op: u32,
    datatype: u32,
    target: *mut u8,
    operand: &[u8],
    compare: &[u8],
    result: &mut [u8],
    count: usize,
) -> Result<(), Errno> {
    let bytes = element_bytes(datatype).and_then(|size| size.checked_mul(count));
    let bytes = bytes.ok_or(Errno::EINVAL)?;
    let complete = |given: &[u8], needed: bool| given.len() >= if needed { bytes } else { 0 };
    if !complete(operand, op != OP_READ)
        || !complete(compare, op >= OP_CSWAP)
        || !complete(result, !result.is_empty())
    {
        return Err(Errno::EINVAL);
    }
    let _serial = SERIAL.lock();
    dispatch(datatype, Apply { op, target, operand, compare, result, count })
        .unwrap_or(Err(Errno::EOPNOTSUPP))
}

/// Something to do for an element type known only at run time.
trait Visit {
    type Output;
    fn visit<T: Element>(self) -> Self::Output;
}

fn dispatch<V: Visit>(datatype: u32, visitor: V) -> Option<V::Output> {
    Some(match datatype {
        INT8 => visitor.visit::<i8>(),
        UINT8 => visitor.visit::<u8>(),
        INT16 => visitor.visit::<i16>(),
        UINT16 => visitor.visit::<u16>(),
        INT32 => visitor.visit::<i32>(),
        UINT32 => visitor.visit::<u32>(),
        INT64 => visitor.visit::<i64>(),
        UINT64 => visitor.visit::<u64>(),
        INT128 => visitor.visit::<i128>(),
        UINT128 => visitor.visit::<u128>(),
        FLOAT => visitor.visit::<f32>(),
        DOUBLE => visitor.visit::<f64>(),
        FLOAT_COMPLEX => visitor.visit::<Complex<f32>>(),
        DOUBLE_COMPLEX => visitor.visit::<Complex<f64>>(),
        #[cfg(target_arch = "x86_64")]
        LONG_DOUBLE => visitor.visit::<x87::LongDouble>(),
        #[cfg(target_arch = "x86_64")]
        LONG_DOUBLE_COMPLEX => visitor.visit::<Complex<x87::LongDouble>>(),
        _ => return None,
    })
}

struct Size;

impl Visit for Size {
    type Output = usize;
    fn visit<T: Element>(self) -> usize {
        size_of::<T>()
    }
}

struct Probe {
    op: u32,
}

impl Visit for Probe {
    type Output = bool;
    fn visit<T: Element>(self) -> bool {
        T::combine(self.op, T::ZERO, T::ZERO, T::ZERO).is_some()
    }
}

struct Apply<'a> {
    op: u32,
    target: *mut u8,
    operand: &'a [u8],
    compare: &'a [u8],
    result: &'a mut [u8],
    count: usize,
}

impl Visit for Apply<'_> {
    type Output = Result<(), Errno>;

    fn visit<T: Element>(self) -> Result<(), Errno> {
        for index in 0..self.count {
            // SAFETY: `apply`'s caller vouches for `count` elements at the target; the slices were
            // measured, and an empty one is not touched. No alignment is assumed.
            unsafe {
                let target = self.target.cast::<T>().add(index);
                let old = target.read_unaligned();
                let operand = element(self.operand, index);
                let compare = element(self.compare, index);
                let new = T::combine(self.op, old, operand, compare).ok_or(Errno::EOPNOTSUPP)?;
                if !self.result.is_empty() {
                    self.result.as_mut_ptr().cast::<T>().add(index).write_unaligned(old);
                }
                target.write_unaligned(new);
            }
        }
        Ok(())
    }
}

/// # Safety
/// `bytes` is empty or holds `index + 1` elements.
unsafe fn element<T: Element>(bytes: &[u8], index: usize) -> T {
    if bytes.is_empty() {
        return T::ZERO;
    }
    // SAFETY: the caller's promise.
    unsafe { bytes.as_ptr().cast::<T>().add(index).read_unaligned() }
}

/// A type atomics work on. Every bit pattern is a value.
trait Element: Copy {
    const ZERO: Self;

    /// The new value; `None`: there is no such operation on this type.
    fn combine(op: u32, old: Self, operand: Self, compare: Self) -> Option<Self>;
}

macro_rules! integers {
    ($($integer:ty),*) => {
        $(
            impl Element for $integer {
                const ZERO: Self = 0;

                fn combine(op: u32, old: Self, operand: Self, compare: Self) -> Option<Self> {
                    let truth = |value: bool| Some(Self::from(value));
                    match op {
                        OP_SUM => Some(old.wrapping_add(operand)),
                        OP_PROD => Some(old.wrapping_mul(operand)),
                        OP_BOR => Some(old | operand),
                        OP_BAND => Some(old & operand),
                        OP_BXOR => Some(old ^ operand),
                        OP_LOR => truth(old != 0 || operand != 0),
                        OP_LAND => truth(old != 0 && operand != 0),
                        OP_LXOR => truth((old != 0) != (operand != 0)),
                        OP_MSWAP => Some((operand & compare) | (old & !compare)),
                        _ => ordered(op, old, operand, compare),
                    }
                }
            }
        )*
    };
}

integers!(i8, u8, i16, u16, i32, u32, i64, u64, i128, u128);

/// The operations that need nothing but an order.
fn ordered<T: PartialOrd + Copy>(op: u32, old: T, operand: T, compare: T) -> Option<T> {
    let swap_if = |condition: bool| Some(if condition { operand } else { old });
    match op {
        OP_MIN => swap_if(operand < old),
        OP_MAX => swap_if(operand > old),
        OP_CSWAP_LE => swap_if(compare <= old),
        OP_CSWAP_LT => swap_if(compare < old),
        OP_CSWAP_GE => swap_if(compare >= old),
        OP_CSWAP_GT => swap_if(compare > old),
        _ => equated(op, old, operand, compare),
    }
}

/// The operations that need nothing but equality.
fn equated<T: PartialEq + Copy>(op: u32, old: T, operand: T, compare: T) -> Option<T> {
    let swap_if = |condition: bool| Some(if condition { operand } else { old });
    match op {
        OP_READ => Some(old),
        OP_WRITE => Some(operand),
        OP_CSWAP => swap_if(compare == old),
        OP_CSWAP_NE => swap_if(compare != old),
        _ => None,
    }
}

/// A floating-point type.
trait Real: Copy + PartialOrd {
    const ZERO: Self;
    const ONE: Self;
    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    fn times(self, other: Self) -> Self;
}

macro_rules! reals {
    ($($real:ty),*) => {
        $(
            impl Real for $real {
                const ZERO: Self = 0.0;
                const ONE: Self = 1.0;
                fn plus(self, other: Self) -> Self {
                    self + other
                }
                fn minus(self, other: Self) -> Self {
                    self - other
                }
                fn times(self, other: Self) -> Self {
                    self * other
                }
            }

            impl Element for $real {
                const ZERO: Self = <$real as Real>::ZERO;
                fn combine(op: u32, old: Self, operand: Self, compare: Self) -> Option<Self> {
                    real_combine(op, old, operand, compare)
                }
            }
        )*
    };
}

reals!(f32, f64);

fn real_combine<T: Real>(op: u32, old: T, operand: T, compare: T) -> Option<T> {
    let truth = |value: bool| Some(if value { T::ONE } else { T::ZERO });
    let (a, b) = (old != T::ZERO, operand != T::ZERO);
    match op {
        OP_SUM => Some(old.plus(operand)),
        OP_PROD => Some(old.times(operand)),
        OP_LOR => truth(a || b),
        OP_LAND => truth(a && b),
        OP_LXOR => truth(a != b),
        _ => ordered(op, old, operand, compare),
    }
}

#[derive(Clone, Copy, PartialEq)]
#[repr(C)]
struct Complex<T> {
    real: T,
    imaginary: T,
}

impl<T: Real> Element for Complex<T> {
    const ZERO: Self = Complex { real: T::ZERO, imaginary: T::ZERO };

    fn combine(op: u32, old: Self, operand: Self, compare: Self) -> Option<Self> {
        let truth = |value: bool| {
            Some(Complex { real: if value { T::ONE } else { T::ZERO }, imaginary: T::ZERO })
        };
        let (a, b) = (old != Self::ZERO, operand != Self::ZERO);
        match op {
            OP_SUM => Some(Complex {
                real: old.real.plus(operand.real),
                imaginary: old.imaginary.plus(operand.imaginary),
            }),
            OP_PROD => Some(Complex {
                real: old.real.times(operand.real).minus(old.imaginary.times(operand.imaginary)),
                imaginary: old
                    .real
                    .times(operand.imaginary)
                    .plus(old.imaginary.times(operand.real)),
            }),
            OP_LOR => truth(a || b),
            OP_LAND => truth(a && b),
            OP_LXOR => truth(a != b),
            _ => equated(op, old, operand, compare),
        }
    }
}

/// C's `long double` on x86-64: ten bytes of x87 extended precision in sixteen.
#[cfg(target_arch = "x86_64")]
mod x87 {
    use std::arch::asm;
    use std::cmp::Ordering;

    use super::{Element, Real, real_combine};

    #[derive(Clone, Copy)]
    #[repr(C, align(16))]
    pub struct LongDouble([u8; 16]);

    impl LongDouble {
        #[cfg(test)]
        pub fn of(value: f64) -> LongDouble {
            let mut wide = LongDouble([0; 16]);
            // SAFETY: loads eight bytes, stores ten; the x87 stack is left as it was.
            unsafe {
                asm!(
                    "fld qword ptr [{value}]", "fstp tbyte ptr [{wide}]",
                    value = in(reg) &value, wide = in(reg) &mut wide.0,
                    out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                    out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                );
            }
            wide
        }

        #[cfg(test)]
        pub fn to_bytes(self) -> [u8; 16] {
            self.0
        }

        /// `first > second`; false if either is not a number.
        fn exceeds(first: &Self, second: &Self) -> bool {
            let above: u8;
            // SAFETY: loads ten bytes each; the x87 stack is left as it was.
            unsafe {
                asm!(
                    "fld tbyte ptr [{second}]", "fld tbyte ptr [{first}]",
                    "fcomip st, st(1)", "fstp st(0)", "seta {above}",
                    first = in(reg) &first.0, second = in(reg) &second.0,
                    above = out(reg_byte) above,
                    out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                    out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                );
            }
            above != 0
        }

        /// Neither is not a number.
        fn comparable(first: &Self, second: &Self) -> bool {
            let ordered: u8;
            // SAFETY: as above.
            unsafe {
                asm!(
                    "fld tbyte ptr [{second}]", "fld tbyte ptr [{first}]",
                    "fucomip st, st(1)", "fstp st(0)", "setnp {ordered}",
                    first = in(reg) &first.0, second = in(reg) &second.0,
                    ordered = out(reg_byte) ordered,
                    out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                    out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                );
            }
            ordered != 0
        }
    }

    macro_rules! arithmetic {
        ($name:ident, $instruction:literal) => {
            fn $name(self, other: Self) -> Self {
                let mut result = LongDouble([0; 16]);
                // SAFETY: loads ten bytes each, stores ten; the x87 stack is left as it was.
                unsafe {
                    asm!(
                        "fld tbyte ptr [{first}]", "fld tbyte ptr [{second}]",
                        $instruction, "fstp tbyte ptr [{result}]",
                        first = in(reg) &self.0, second = in(reg) &other.0,
                        result = in(reg) &mut result.0,
                        out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                        out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                    );
                }
                result
            }
        };
    }

    impl Real for LongDouble {
        const ZERO: Self = LongDouble([0; 16]);
        const ONE: Self = LongDouble([0, 0, 0, 0, 0, 0, 0, 0x80, 0xff, 0x3f, 0, 0, 0, 0, 0, 0]);

        arithmetic!(plus, "faddp st(1), st");
        arithmetic!(minus, "fsubp st(1), st");
        arithmetic!(times, "fmulp st(1), st");
    }

    impl PartialEq for LongDouble {
        fn eq(&self, other: &Self) -> bool {
            self.partial_cmp(other) == Some(Ordering::Equal)
        }
    }

    impl PartialOrd for LongDouble {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            if !Self::comparable(self, other) {
                return None;
            }
            Some(match (Self::exceeds(self, other), Self::exceeds(other, self)) {
                (true, _) => Ordering::Greater,
                (_, true) => Ordering::Less,
                _ => Ordering::Equal,
            })
        }
    }

    impl Element for LongDouble {
        const ZERO: Self = <Self as Real>::ZERO;
        fn combine(op: u32, old: Self, operand: Self, compare: Self) -> Option<Self> {
            real_combine(op, old, operand, compare)
        }
    }
}
